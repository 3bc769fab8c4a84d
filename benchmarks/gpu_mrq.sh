#!/usr/bin/env bash
# MR.Q on one GPU in at most 8 minutes: its tests, a training run at the published widths, and its speed.
#
#   benchmarks/gpu_mrq.sh [PYTHON]               PYTHON: an interpreter that has the packages; by default $PYTHON, else
#                                                uv's, else the python at hand, else that of a new .venv-gpu
#   benchmarks/gpu_mrq.sh --rehearse [PYTHON]    the same on the CPU at tiny sizes: does the script itself work?
#
# Writes to $OUT, by default runs/gpu_mrq, over what an earlier call left there: summary.md, log.txt,
# training/{curve.png,metrics.jsonl,config.json}, speed/{mrq_speed.md,mrq_speed.json}. Paths are from the repository's
# folder. Parts have their own limits, and one that fails does not stop the next.
# Exit code: 1 (tests) + 2 (training) + 4 (speed) of those that failed; 8 where nothing could run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 8

rehearse=
if [ "${1:-}" = --rehearse ]; then rehearse=1 && shift; fi
platform=cuda,cpu backend=gpu extra=(--extra cuda) tests=mrq environment=brax/hopper
train=(--seeds 0 1 2 3 4 5 6 7 --steps 100000 --eval-period 2500)
# The replay holds what can be reached here; at the published 1e6 the checkpoint of 8 seeds would be 1.4 GB.
config=(--config.capacity 100000)
speed=(--widths 512 --seeds 1 8 32 --period 50 --repeats 3 --turn 2)
if [ -n "$rehearse" ]; then
  platform=cpu backend=cpu extra=() tests="mrq and (two_hot or docstring)"
  environment=Pendulum-v1 # Brax compiles for a minute
  train=(--seeds 0 1 --steps 600 --eval-period 200 --eval-episodes 2)
  config=(--config.capacity 1000 --config.prefill 200 --config.target-period 50 --config.batch-size 16)
  for name in zs-size za-size zsa-size hidden-size; do config+=("--config.$name" 16); done
  speed=(--widths 16 --seeds 1 2 --period 5 --repeats 2 --turn 0.1)
fi
OUT=${OUT:-runs/gpu_mrq${rehearse:+_rehearsal}}
mkdir -p "$OUT" && rm -rf "$OUT"/{training,speed} || exit 8
export JAX_PLATFORMS=$platform PYTHONUNBUFFERED=1

# The first interpreter that has the packages and finds the device.
probe="import brax, flax, gymnax, jax, optax, orbax.checkpoint, pytest, rich, tyro, yaml
assert jax.default_backend() == '$backend', jax.default_backend()
print(jax.devices()[0].device_kind, '| jax', jax.__version__)"
try() {
  python=("$@")
  device=$("$@" -c "$probe" 2>> "$OUT/log.txt" | tail -1)
}
: > "$OUT/log.txt"
if [ -n "${1:-${PYTHON:-}}" ]; then
  try "${1:-${PYTHON:-}}"
elif ! try uv run "${extra[@]}" python && ! try python && ! try .venv-gpu/bin/python; then
  python3 -m venv .venv-gpu && .venv-gpu/bin/python -m pip install -q '.[cuda]' pytest && try .venv-gpu/bin/python
fi || { tail -5 "$OUT/log.txt"; echo "no interpreter with the packages and a device; see $OUT/log.txt"; exit 8; }
echo "device: $device; found in $SECONDS s"
left=$((SECONDS < 235 ? 465 - SECONDS : 230)) # 8 minutes with what is above, but never too few to train
{ printf 'Device: %s\n\n| part | seconds | limit | exit code |\n|---|---|---|---|\n' "$device"; } > "$OUT/summary.md"

part() { # name, limit in seconds, command...: runs it; notes how long it took and how it ended (124: its limit)
  local name=$1 limit=$2 began=$SECONDS code
  shift 2
  echo && echo "== $name, at most $limit s: $*"
  timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$OUT/log.txt"
  code=${PIPESTATUS[0]}
  echo "| $name | $((SECONDS - began)) | $limit | $code |" | tee -a "$OUT/summary.md"
  return "$code"
}

# 1. Goldens, then the contract, at full precision: TF32 would miss their 1e-6.
failed=0
part tests $((left * 110 / 465)) \
  env XLA_FLAGS=--xla_gpu_deterministic_ops=true JAX_DEFAULT_MATMUL_PRECISION=highest \
  "${python[@]}" -m pytest -v --durations=5 -p no:cacheprovider tests/test_mrq.py tests/test_contract.py -k "$tests" ||
  failed=$((failed + 1))

# 2. Training, as far as it gets; the rest of the limit is for imports, the last evaluation and the curve.
limit=$((left * 195 / 465))
part training "$limit" \
  "${python[@]}" scripts/train.py --algo mrq --preset published --env "$environment" "${train[@]}" "${config[@]}" \
  --num-envs 1 --run-dir "$OUT/training" --time-limit $((limit - 45)) || failed=$((failed + 2))
[ -s "$OUT/training/metrics.jsonl" ] || echo "| no evaluation was reached | | | |" | tee -a "$OUT/summary.md"
rm -rf "$OUT"/training/{checkpoint,policy} # of 4 million parameters a seed: 0.8 GB

# 3. Speed by the number of seeds, at default precision. Written after each number of seeds.
part speed $((left * 160 / 465)) \
  "${python[@]}" benchmarks/mrq_speed.py --no-parts "${speed[@]}" --out "$OUT/speed" || failed=$((failed + 4))

echo && cat "$OUT/summary.md" && cat "$OUT/speed/mrq_speed.md"
echo "$SECONDS s in all; exit code $failed; written to $OUT"
exit "$failed"
