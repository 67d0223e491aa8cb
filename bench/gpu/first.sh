#!/usr/bin/env bash
# Everything that needs a GPU, in one command and within ten minutes: the most valuable checks first. A stage that fails
# or runs out of time costs the others nothing. Three files come out: first.json (what each stage did, and its figures;
# written again after every stage), tests.xml and logs.tgz.
#
#   OUT=results bench/gpu/first.sh
#
# PYTHON          the interpreter, with torch for CUDA and Triton (python3)
# WHEELS          a folder of wheels for what that interpreter lacks, on a machine without a network
# SECONDS_IN_ALL  how long it may take (570)
#
# Fetch the wheels (40 MB for Python 3.12) on a machine with a network. Without the four older platforms pip takes an
# llguidance that is too old:
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#     --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
#     --platform manylinux_2_26_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
#     --platform manylinux1_x86_64 -d WHEELS \
#     annotated-types==0.8.0 bidict==0.24.1 blinker==1.9.0 brotli==1.2.1 configargparse==1.9.0 deprecated==1.3.1 \
#     duckdb==2.0.0 fastapi==0.165.0 flask==3.1.3 flask-cors==6.0.5 flask-login==0.6.3 gevent==26.9.0 \
#     geventhttpclient==2.6.1 gguf==0.19.0 google-re2==1.1.20251105 greenlet==3.5.6 httptools==0.9.0 \
#     itsdangerous==2.2.0 limits==5.8.0 llguidance==1.9.1 locust==2.47.0 msgspec==0.22.0 opentelemetry-api==1.45.2 \
#     pyahocorasick==2.3.1 pydantic==2.14.3 pydantic-core==2.50.4 python-dotenv==1.2.4 python-engineio==4.15.1 \
#     python-socketio==5.18.1 pyzmq==27.3.0 simple-websocket==1.1.0 starlette==1.10.0 typing-inspection==0.4.5 \
#     uvicorn==0.54.0 watchfiles==1.3.0 websocket-client==1.9.2 websockets==17.4 wsproto==1.3.2 zope-event==6.2 \
#     zope-interface==8.7
set -uo pipefail
OUT=$(mkdir -p "${OUT:-.}" && cd "${OUT:-.}" && pwd)
WHEELS=${WHEELS:+$(cd "$WHEELS" && pwd)}
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
LIMIT=${SECONDS_IN_ALL:-570}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export PYTHONUNBUFFERED=1 COLUMNS=160 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$WORK/triton-cache} # what one stage compiles, the next ones find
export TEARDOWN_CUPTI=0 DISABLE_CUPTI_LAZY_REINIT=1             # replayed graphs are profiled more than once
if [ -n "${WHEELS:-}" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" "$WHEELS"/*.whl \
    > "$WORK/pip.log" 2>&1 && export PYTHONPATH="$WORK/site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
fi

# stage NAME SECONDS COMMAND...: with the status -1 where no time is left.
stage() {
  local name=$1 bound=$2 left=$((LIMIT - SECONDS - 6)) began=$SECONDS status
  shift 2
  if [ "$left" -lt 10 ]; then
    status=-1
    : > "$WORK/$name.log"
  else
    timeout -k 5 "$((bound < left ? bound : left))" "$@" > "$WORK/$name.log" 2>&1
    status=$?
  fi
  "$PYTHON" bench/gpu/stages.py "$WORK" "$OUT/first.json" "$name" "$status" "$((SECONDS - began))"
  tar czf "$OUT/logs.tgz" -C "$WORK" $(cd "$WORK" && ls ./*.log)
}

bench() { local name=$1 bound=$2; shift 2; stage "$name" "$bound" "$PYTHON" -m sojourn dev bench "$@" --json "$WORK/$name.json"; }

stage facts 40 "$PYTHON" bench/gpu/stages.py --facts "$WORK/facts.json"
stage smoke 80 "$PYTHON" -m bench.gpu.smoke --json "$WORK/smoke.json"
stage tests 100 "$PYTHON" -m pytest -q -m gpu -n 8 --timeout 90 -p no:cacheprovider --junitxml "$OUT/tests.xml" \
  $(grep -rl --include='*.py' '^@pytest.mark.gpu' tests/engine)
stage calibrate 40 "$PYTHON" -m sojourn calibrate device --device cuda
bench qwen3-0.6b 90 offline qwen3-0.6b --workload nano-vllm --repeats 2
stage profile 50 "$PYTHON" -m bench.gpu.smoke --profile qwen3-0.6b --json "$WORK/profile.json"
bench kernels 60 kernels triton_attention triton_operations
bench variants 120 offline qwen3-0.6b --workload nano-vllm --repeats 1 --one-at-a-time --variant no-overlap:overlap=off \
  --variant no-graphs:graphs=off --variant fp8-kv:kv_cache_dtype=fp8
bench qwen3-14b 120 offline qwen3-14b --workload nano-vllm --repeats 1
stage ladder 300 "$PYTHON" -m sojourn dev ladder --device cuda --repeats 1 --output "$WORK/ladder" --docs "$OUT/ladder.md"
bench transformers 240 offline qwen3-0.6b --workload nano-vllm --repeats 1 --one-at-a-time \
  --peer "transformers=$(command -v "$PYTHON")"
