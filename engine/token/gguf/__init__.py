"""Models of llama.cpp: a GGUF file stands for a checkpoint folder. Only `tensors` knows torch."""
