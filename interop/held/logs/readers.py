"""The readers of logs, pages, flags and sensors' texts."""

from sojourn.interop.held.held import Reader
from sojourn.interop.held.logs import (
    fault_text,
    flags,
    llama_cpp,
    model_config,
    nvidia_smi,
    request_lines,
    sglang,
    tensorrt_llm,
    vllm,
)
from sojourn.interop.held.logs.pages import PAGE_READER

LOG_READERS: tuple[Reader, ...] = (
    Reader(
        kind="model configuration",
        shows="KV bytes of a token and of a context, by the kinds of its layers",
        recognises=model_config.recognises,
        read=model_config.read,
    ),
    Reader(
        kind="sensors of GPUs",
        shows="power, clocks, memory, utilisation and throttle reasons of nvidia-smi or a DCGM exporter",
        recognises=nvidia_smi.recognises,
        read=nvidia_smi.read,
        shares_text=True,
    ),
    PAGE_READER,
    Reader(
        kind="vLLM log",
        shows="flags, version, KV size, load and rates over time, preemptions, tracebacks, deaths; no latency",
        recognises=vllm.recognises,
        read=vllm.read,
        shares_text=True,
    ),
    Reader(
        kind="SGLang log",
        shows="flags, KV size, load, rates and cache hits over time, retractions, tracebacks; no latency",
        recognises=sglang.recognises,
        read=sglang.read,
        shares_text=True,
    ),
    Reader(
        kind="TensorRT-LLM log",
        shows="steps with host and device time, scheduled requests, KV use; no latency of requests",
        recognises=tensorrt_llm.recognises,
        read=tensorrt_llm.read,
        shares_text=True,
    ),
    Reader(
        kind="llama.cpp log",
        shows="prefill and decode time of each task, prompts that were computed again, context and slots; no queue",
        recognises=llama_cpp.recognises,
        read=llama_cpp.read,
        shares_text=True,
    ),
    Reader(
        kind="lines of requests of Dynamo, TGI, Ray Serve and Ollama",
        shows="latencies of each request, as the front times them; failures",
        recognises=request_lines.recognises,
        read=request_lines.read,
        shares_text=True,
    ),
    Reader(
        kind="flags",
        shows="the settings on the command line of vLLM, SGLang, llama-server, TensorRT-LLM or TGI",
        recognises=flags.recognises,
        read=flags.read,
        shares_text=True,
    ),
    Reader(
        kind="error message",
        shows="memory that ran out, a traceback's last line, a death, a hang; neither load nor settings",
        recognises=fault_text.recognises,
        read=fault_text.read,
        shares_text=True,
    ),
)
