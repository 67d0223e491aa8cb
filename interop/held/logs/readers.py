"""The readers of logs, pages, flags and sensors' texts."""

from sojourn.interop.held.held import Reader
from sojourn.interop.held.logs import llama_cpp, sglang, tensorrt_llm, vllm
from sojourn.interop.held.logs.pages import PAGE_READER

LOG_READERS: tuple[Reader, ...] = (
    PAGE_READER,
    Reader(
        kind="vLLM log",
        shows="flags, version, KV size, load and rates over time, preemptions, tracebacks, deaths; no latency",
        recognises=vllm.recognises,
        read=vllm.read,
    ),
    Reader(
        kind="SGLang log",
        shows="flags, KV size, load, rates and cache hits over time, retractions, tracebacks; no latency",
        recognises=sglang.recognises,
        read=sglang.read,
    ),
    Reader(
        kind="TensorRT-LLM log",
        shows="steps with host and device time, scheduled requests, KV use; no latency of requests",
        recognises=tensorrt_llm.recognises,
        read=tensorrt_llm.read,
    ),
    Reader(
        kind="llama.cpp log",
        shows="prefill and decode time of each task, prompts that were computed again, context and slots; no queue",
        recognises=llama_cpp.recognises,
        read=llama_cpp.read,
    ),
)
