#!/usr/bin/env bash
# Everything that needs a GPU, in one command and within 9 minutes on one H200: the gpu tests, the kernels beside their
# limits, the nano-vllm workload on the shapes of Qwen3-0.6B and 14B (random weights), ablations, and transformers'
# continuous batching as a peer. Writes gpu.json and gpu.md below $OUT (by default here), and one log a stage.
#
#   OUT=results bench/gpu.sh
#
# PYTHON    the interpreter, with torch for CUDA and Triton (python3)
# WHEELS    a folder of wheels for what that interpreter lacks, on a machine without a network: they are unpacked
#           into a temporary folder. Fetch them elsewhere with
#             pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#               --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d WHEELS NAME ...
# SECONDS_IN_ALL   how long it may take (540)
set -uo pipefail
OUT=$(mkdir -p "${OUT:-.}" && cd "${OUT:-.}" && pwd)
WHEELS=${WHEELS:+$(cd "$WHEELS" && pwd)}
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
LIMIT=${SECONDS_IN_ALL:-540}
export PYTHONUNBUFFERED=1 COLUMNS=160 HF_HUB_OFFLINE=1
STAGES="$OUT/stages.txt"
: > "$STAGES"

if [ -n "${WHEELS:-}" ]; then
  SITE=$(mktemp -d)
  trap 'rm -rf "$SITE"' EXIT
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$SITE" "$WHEELS"/*.whl || exit 1
  export PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}"
fi
"$PYTHON" - <<'CHECK' || exit 1
import importlib.util, sys
needed = "torch triton pydantic msgspec zmq minijinja llguidance tokenizers safetensors duckdb pandas pyarrow psutil typer rich yaml pytest httpx"
missing = [name for name in needed.split() if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"gpu.sh: this Python lacks {', '.join(missing)}; install them, or name a folder of wheels with WHEELS")
import torch
if not torch.cuda.is_available():
    sys.exit("gpu.sh: torch finds no CUDA device")
CHECK

# stage NAME SECONDS COMMAND...: one that fails, or takes too long, costs the others nothing.
stage() {
  local name=$1 bound=$2 left=$((LIMIT - SECONDS - 10)) began=$SECONDS status
  shift 2
  if [ "$left" -lt 20 ]; then
    echo "$name: left out, $LIMIT s are over" | tee -a "$STAGES"
    return
  fi
  timeout -k 20 "$((bound < left ? bound : left))" "$@" > "$OUT/$name.log" 2>&1
  status=$?
  case $status in 0) status=done ;; 124 | 137) status="cut short" ;; *) status="failed ($status)" ;; esac
  echo "$name: $status after $((SECONDS - began)) s; $(grep -v '^ *$' "$OUT/$name.log" | tail -1 | cut -c1-200)" | tee -a "$STAGES"
}

bench() { local name=$1 bound=$2; shift 2; rm -f "$OUT/$name.json"; stage "$name" "$bound" "$PYTHON" -m sojourn bench "$@" --json "$OUT/$name.json"; }

stage calibrate 60 "$PYTHON" -m sojourn calibrate-device --device cuda
# Of the tests only the files that have some for a GPU: others import what such a machine need not have.
stage tests 120 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider $(grep -rl --include='*.py' '^@pytest.mark.gpu' tests/engine)
bench kernels 75 kernels triton_attention triton_operations
bench qwen3-0.6b 90 offline qwen3-0.6b --workload nano-vllm --repeats 3
bench qwen3-14b 130 offline qwen3-14b --workload nano-vllm --repeats 2
bench ablations 150 offline qwen3-0.6b --workload nano-vllm --ablate --variant fp8-kv:kv_cache_dtype=fp8 \
  --repeats 1 --one-at-a-time
bench transformers 150 offline qwen3-0.6b --workload nano-vllm --peer "transformers=$(command -v "$PYTHON")" \
  --repeats 1 --one-at-a-time
"$PYTHON" -m bench.report.gather "$OUT" gpu kernels qwen3-0.6b qwen3-14b ablations transformers
