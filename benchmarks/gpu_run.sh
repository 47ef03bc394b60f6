#!/bin/sh
# All that is known of a CUDA device, in one call: sh benchmarks/gpu_run.sh [FOLDER]
# Tests first, then figures, as small JSON files in FOLDER (default: benchmarks/results/gpu). The
# profiles are for plans elsewhere: remat run --device h100 --profile FILE. Afterwards
# `python -m benchmarks.gpu_page` writes what the figures say into docs/models.md.
# Each part has a limit in seconds, so that all of it ends within nine minutes.
set -u
cd "$(dirname "$0")/.." || exit 1
folder=${1:-benchmarks/results/gpu}
python=${PYTHON:-python3}
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "gpu_run: there is no CUDA device here" >&2
    exit 2
}
mkdir -p "$folder" || exit 1
export PYTHONWARNINGS=ignore PYTHONUNBUFFERED=1
failed=

part() { # part NAME LIMIT_S COMMAND...
    name=$1 limit_s=$2
    shift 2
    began=$(date +%s)
    timeout "$limit_s" "$@"
    code=$?
    echo "== $name: exit code $code, $(($(date +%s) - began)) s"
    [ "$code" -eq 0 ] || failed="$failed $name"
}

part tests 140 "$python" -m pytest -q -m gpu --show-capture=no tests/gpu
part links 15 "$python" -m benchmarks.gpu.links --out "$folder/links.json"
part steps 130 "$python" -m benchmarks.gpu.steps --out "$folder/steps.json"
part copies 60 "$python" -m benchmarks.gpu.copies --out "$folder/copies.json"
part compiled 90 "$python" -m benchmarks.gpu.compiled gpt2-small --out "$folder/compiled.json"
for name in gpt resnet; do
    part "profile of $name" 20 "$python" -m remat profile "examples/$name.py:factory" --device cuda \
        -o "$folder/profile_$name.json"
done
part zoo 60 "$python" -m benchmarks.gpu_zoo --only example "low-rank" --out "$folder/zoo.json"
[ -z "$failed" ] || {
    echo "gpu_run: failed:$failed" >&2
    exit 1
}
