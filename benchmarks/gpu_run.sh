#!/bin/sh
# All that is known of a CUDA device, in one call: sh benchmarks/gpu_run.sh [FOLDER]
# Tests first, then figures, as small JSON files in FOLDER (default: benchmarks/results/gpu). The
# profiles are for plans elsewhere: remat run --device h100 --profile FILE. Afterwards
# `python -m benchmarks.gpu_page` writes what the figures say into docs/models.md.
# Each part has a limit in seconds, so that all of it ends within nine minutes.
# `--rehearse` before FOLDER runs every part on the CPU, with small models: what it writes says
# nothing of a GPU, but the next run on one meets no surprise. Its tests are skipped then.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
if [ "${1:-}" = --rehearse ]; then
    [ $# -eq 2 ] || { echo "gpu_run: --rehearse FOLDER: a folder that is not kept" >&2 && exit 2; }
    shift
    device=cpu small="gpt2-tiny --suite smoke --device cpu --budgets 80%"
    compiled=$small zoo=gpt links="tests.on_fake_cuda benchmarks.gpu.links --device cpu"
    # Of the examples.
    export GPT_LAYERS=2 GPT_WIDTH=64 GPT_HEADS=2 GPT_SEQ=64 GPT_VOCAB=128
    export RESNET_WIDTH=8 RESNET_BATCH=4
else
    device=cuda small="" compiled=gpt2-small zoo="example low-rank" links=benchmarks.gpu.links
fi
folder=${1:-benchmarks/results/gpu}
found=$("$python" -c 'import torch; print(torch.cuda.is_available())' 2> /dev/null)
case $found-$device in
True-* | False-cpu) ;;
False-*) echo "gpu_run: there is no CUDA device here" >&2 && exit 2 ;;
*) echo "gpu_run: $python cannot import torch: set PYTHON to one that does" >&2 && exit 2 ;;
esac
mkdir -p "$folder" || exit 1
export PYTHONWARNINGS=ignore PYTHONUNBUFFERED=1
failed=

part() { # part NAME LIMIT_S COMMAND...
    name=$1 limit_s=$2
    shift 2
    # A CPU may be busy with other work.
    [ "$device" = cuda ] || limit_s=$((10 * limit_s))
    began=$(date +%s)
    timeout "$limit_s" "$@"
    code=$?
    echo "== $name: exit code $code, $(($(date +%s) - began)) s"
    [ "$code" -eq 0 ] || failed="$failed $name"
}

part tests 140 "$python" -m pytest -q -m gpu --show-capture=no tests/gpu
# What a variable holds is several words.
# shellcheck disable=SC2086
{
    part links 15 "$python" -m $links --out "$folder/links.json"
    part steps 130 "$python" -m benchmarks.gpu.steps $small --out "$folder/steps.json"
    part copies 60 "$python" -m benchmarks.gpu.copies $small --out "$folder/copies.json"
    part compiled 90 "$python" -m benchmarks.gpu.compiled $compiled --out "$folder/compiled.json"
    for name in gpt resnet; do
        part "profile of $name" 20 "$python" -m remat profile "examples/$name.py:factory" \
            --device $device -o "$folder/profile_$name.json"
    done
    part zoo 60 "$python" -m benchmarks.gpu_zoo --device $device --only $zoo --out "$folder/zoo.json"
}
[ -z "$failed" ] || {
    echo "gpu_run: failed:$failed" >&2
    exit 1
}
