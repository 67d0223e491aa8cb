#!/usr/bin/env bash
# The comparison with vLLM and llama.cpp on a CPU: small (29 M parameters) and 06b (596 M), random weights, same prompts.
# Nothing else may run meanwhile. Writes cpu.json and cpu.md below $OUT (by default here).
#
#   bench/cpu_peers.sh CHECKPOINTS VLLM_PYTHON LLAMA_SERVER
#
# CHECKPOINTS holds small/ and 06b/ (Hugging Face format) and small-f32.gguf, small-q8_0.gguf, 06b-f32.gguf and
# 06b-q8_0.gguf, made of them by llama.cpp's convert_hf_to_gguf.py and llama-quantize.
# REPEATS (3) and SHAPES ("small 06b") cut it short: some 10 minutes for small, 35 for 06b, 5 for the rest.
# Engines of `small` stay up side by side (idle ones sleep); of `06b` only vLLM does, because memory does not hold all.
set -euo pipefail
CHECKPOINTS=$(cd "$1" && pwd) VLLM=$2 LLAMA=$3
OUT=$(mkdir -p "${OUT:-.}" && cd "${OUT:-.}" && pwd)
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python} REPEATS=${REPEATS:-3}
export COLUMNS=${COLUMNS:-160}

"$PYTHON" -m sojourn calibrate device --device cpu
for shape in ${SHAPES:-small 06b}; do
  how=(--variant float32:weights=float32)
  if [ "$shape" = 06b ]; then how=(--one-at-a-time --requests-per-stream 1); fi
  "$PYTHON" -m sojourn dev bench online "$CHECKPOINTS/$shape" -c 1 -c 8 -c 32 --burst --repeats "$REPEATS" \
    --variant int8:weights=int8 "${how[@]}" \
    --peer "vllm=$VLLM" --peer "llama-server=$LLAMA" \
    --peer-model "$CHECKPOINTS/$shape-f32.gguf" --peer-model "$CHECKPOINTS/$shape-q8_0.gguf" \
    --json "$OUT/$shape.json" || echo "$shape: cut short; what was measured is kept"
done
"$PYTHON" -m sojourn dev bench offline "$CHECKPOINTS/small" --repeats "$REPEATS" --ablate --variant int8:weights=int8 \
  --peer "transformers=$(command -v "$PYTHON")" --json "$OUT/small-offline.json" || echo "small-offline: cut short"
"$PYTHON" -m sojourn dev bench kernels --json "$OUT/kernels.json"
"$PYTHON" -m bench.report.gather "$OUT" cpu small 06b small-offline kernels
