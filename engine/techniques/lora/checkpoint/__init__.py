"""LoRA adapters as PEFT writes them: what a checkpoint says, and its weights under the names of our parts."""
