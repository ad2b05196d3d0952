# What train.sbatch, sweep.sbatch, serve.sbatch and run.sbatch share: sourced by them. shellcheck shell=bash
#
# Variables:
#   LAUNCH          srun (default): Slurm starts every rank. torchrun: Slurm starts one torchrun on each node.
#   NPROC           ranks of a node, LAUNCH=torchrun only; default: one for each GPU that Slurm gives the job there
#   VENV            virtual environment, on a file system all nodes see; default: .venv where sbatch was called, if there
#   MAX_REQUEUES    stop requeueing after this many (default 100)
#   MASTER_ADDR     where rank 0 listens, a name or an address of the first node that the others reach (on a network that
#                   you trust: docs/security.md); default: the first node's name, on one node 127.0.0.1
#   MASTER_PORT     default: 20000 + job id modulo 12000, so that jobs sharing a node do not meet
#   SRUN_ARGS       more options for srun, e.g. a container: SRUN_ARGS="--container-image=..."
#   NCCL's and CUDA's variables: env.sh
#
# Exit codes: 0 the run is complete; 75 it was stopped on request (TERM) before its end, so that no `afterok` job starts;
# 2 it was refused; else what failed.

STOPPED=75
script="${script:-job.sh}"
limit_near="${limit_near:-0}" # a signal may come before this file is read
child=0
nagger=0
folder=""
id="${SLURM_JOB_ID:-}" # of an array, this task alone
if [[ -n "${SLURM_ARRAY_JOB_ID:-}" ]]; then id="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; fi

say() { echo "$script: $*"; }
fail() { # CODE WORDS
    say "${@:2}" >&2
    exit "$1"
}

on_limit() {
    limit_near=1
    say "the time limit is near: asking the ranks to checkpoint"
    pass_on USR1
    # Again and again: ranks under torchrun ignore it until they listen. To be told twice is to be told once. The last
    # sleep may outlive the job, and must not hold its output open.
    (while sleep 5 && kill -USR1 "$child"; do :; done) >/dev/null 2>&1 &
    nagger=$!
}
pass_on() { # srun passes a signal on to every task of the step
    if ((child)); then kill -"$1" "$child" 2>/dev/null || true; fi
}

# Runs a command beside this shell, which can then act on signals at once; returns its exit code.
attend() {
    local code
    "$@" &
    child=$!
    while true; do
        code=0
        wait "$child" || code=$?
        # A trapped signal ends `wait` early, with a code that is not the command's.
        kill -0 "$child" 2>/dev/null || break
    done
    code=0
    wait "$child" || code=$?
    child=0
    if ((nagger)); then kill "$nagger" 2>/dev/null || true; fi
    return "$code"
}

# Sets PATH, nodes, ranks, step (the command before each rank's), one (the command before a single task's) and where
# ranks meet.
prepare() {
    local venv="${VENV:-}" extra=() first
    trap on_limit USR1
    trap 'pass_on TERM' TERM
    if [[ -z "$venv" && -d "${SLURM_SUBMIT_DIR:-$PWD}/.venv" ]]; then
        venv="${SLURM_SUBMIT_DIR:-$PWD}/.venv"
    fi
    if [[ -n "$venv" ]]; then export PATH="$venv/bin:$PATH"; fi
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    if [[ ${#nodes[@]} -eq 0 ]]; then
        fail 2 "no host names in SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST. Start this with sbatch."
    fi
    read -r -a extra <<<"${SRUN_ARGS:-}"
    # srun has not inherited --cpus-per-task since Slurm 22.05.
    one=(srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="${nodes[0]}" "${extra[@]}")
    # One failing rank ends the step.
    step=(srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${extra[@]}")
    if [[ -z "${MASTER_ADDR:-}" ]]; then
        first="${nodes[0]}"
        if [[ ${#nodes[@]} == 1 ]]; then
            first=127.0.0.1 # all ranks are on one node, and nobody else is to reach them
        elif [[ "$(address_of "$first")" == 127.* ]]; then
            # The name by which this node knows itself (Debian: 127.0.1.1); the next node knows a better one.
            first="$(srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="${nodes[1]}" \
                getent ahostsv4 "$first" | awk 'NR == 1 { print $1 }')"
        fi
        export MASTER_ADDR="${first:-${nodes[0]}}"
    fi
    export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 12000))}"
}
address_of() { getent ahostsv4 "$1" | awk 'NR == 1 { print $1 }' || true; }

# Adds to `step` what starts the ranks of a verb, by LAUNCH; sets ranks and here (ranks of a node).
ranks_of() { # VERB WORDS
    local relay
    case "${LAUNCH:-srun}" in
    srun)
        # Ranks come from SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID. GPUs are not bound to tasks: peers on a node must
        # see one another's devices.
        ranks="${SLURM_NTASKS:-1}"
        here=$(((ranks + ${#nodes[@]} - 1) / ${#nodes[@]}))
        step+=(megatron-longctx "$@")
        ;;
    torchrun)
        here="${NPROC:-${SLURM_GPUS_ON_NODE:-0}}"
        if ((here == 0)); then
            fail 2 "LAUNCH=torchrun without GPUs: expected NPROC, the ranks of a node. Set it, or leave LAUNCH out."
        fi
        ranks=$((here * ${#nodes[@]}))
        # torchrun dies of USR1 and USR2 and does not pass them on, so a shell before it does that. Ignored signals stay
        # ignored in what torchrun starts until training takes them over.
        # It finds out by names which agent hosts their meeting, and none does where a host's name is 127.0.1.1.
        # shellcheck disable=SC2016  # expanded by the shell on the node
        relay='
            export PET_RDZV_CONF="is_host=$((SLURM_NODEID == 0))"
            (trap "" USR1 USR2; exec "$@") & agent=$!
            trap "pkill -USR1 -P $agent || true" USR1
            trap "pkill -USR2 -P $agent || true" USR2
            trap "kill -TERM $agent" TERM
            while true; do
                code=0; wait "$agent" || code=$?
                kill -0 "$agent" 2>/dev/null || break
            done
            wait "$agent"'
        step+=(
            --ntasks="${#nodes[@]}" --ntasks-per-node=1 bash -c "$relay" relay
            torchrun --nnodes="${#nodes[@]}" --nproc-per-node="$here" --rdzv-id="$SLURM_JOB_ID"
            --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --no-python megatron-longctx "$@"
        )
        ;;
    *)
        fail 2 "LAUNCH=$LAUNCH: expected srun or torchrun. Set LAUNCH to one of these."
        ;;
    esac
}

status() { # KEY: what the run's status.json says, if this start of this job has written it
    local file="$folder/status.json" job restart
    [[ -n "$folder" && -f "$file" ]] || return 0
    job="$(json "$file" job)" restart="$(json "$file" restart)"
    if [[ "$job" == "$SLURM_JOB_ID" && "${restart/null/}" == "${SLURM_RESTART_COUNT:-}" ]]; then json "$file" "$1"; fi
}
json() { sed -n "s/^ *\"$2\": \"\{0,1\}\([^\",]*\)\"\{0,1\},\{0,1\}\$/\1/p" "$1"; }

preempted() { # Slurm has told this start of the job to make room
    local said start when
    said="$(scontrol show job "$id")"
    start="$(grep -o ' StartTime=[0-9T:-]*' <<<" $said")" when="$(grep -o 'PreemptTime=[0-9T:-]*' <<<"$said")"
    when="${when#*=}" start="${start#*=}"
    [[ "$when" == [0-9]* && ! "$when" < "$start" ]]
}

node_lost() { # a node of this job does not answer; Slurm itself may need minutes to see it
    ((${#nodes[@]} > 1)) && ! timeout 60 srun --ntasks="${#nodes[@]}" --ntasks-per-node=1 true
}

requeue() {
    if ((${SLURM_RESTART_COUNT:-0} >= ${MAX_REQUEUES:-100})); then
        fail 1 "already requeued $SLURM_RESTART_COUNT times (MAX_REQUEUES), ending here"
    fi
    say "requeueing job $id"
    scontrol requeue "$id"
    exit 0
}

# Trains by these words, and ends this script: requeued, complete or failed.
train_job() { # WORDS
    local code=0 said state started=0
    prepare
    ranks_of train "$@"
    said="$(mktemp)"
    # What cannot run is refused here, by one process, before there are ranks that wait for each other.
    LOCAL_WORLD_SIZE="$here" attend "${one[@]}" megatron-longctx train --preflight "$ranks" "$@" >"$said" || code=$?
    cat "$said"
    folder="$(sed -n 's/^run folder: //p' "$said")"
    rm -f "$said"
    if ((code == 0 && !limit_near)); then
        say "job $SLURM_JOB_ID, ${#nodes[@]} node(s), $ranks ranks, rendezvous $MASTER_ADDR:$MASTER_PORT, ${step[*]}"
        started=1
        attend "${step[@]}" || code=$?
    fi
    state="$(status state)"
    if [[ "$state" == complete ]]; then exit 0; fi
    if ((limit_near)); then
        if [[ "$state" == failed ]]; then fail "$((code ? code : 1))" "training failed while checkpointing, not requeueing"; fi
        if [[ "$(status step)" == "$(status began)" ]]; then
            fail 1 "no step was made before the signal for the time limit, and none would be after a requeue:" \
                "raise --time, or lower the seconds of --signal"
        fi
        requeue
    fi
    if [[ "$state" != failed ]] && preempted; then
        say "preempted"
        requeue
    fi
    if [[ "$state" == stopped ]]; then
        fail "$STOPPED" "stopped by $(status signal) at step $(status step): submit it again to go on from there"
    fi
    if ((code && started)) && node_lost; then
        say "a node is lost"
        requeue
    fi
    exit "$code"
}

# Serves until it is stopped, and ends this script: requeued before the time limit and when preempted.
serve_job() { # WORDS
    local code=0
    prepare
    ranks_of serve "$@"
    say "job $SLURM_JOB_ID, first node ${nodes[0]}, $ranks ranks, rendezvous $MASTER_ADDR:$MASTER_PORT, ${step[*]}"
    attend "${step[@]}" || code=$?
    if ((limit_near && (code == 0 || code == 138))) || { ((code == 0 || code == 143)) && preempted; }; then
        requeue
    fi
    exit "$code"
}

# Runs another verb, on every task or in one process, and ends this script with its exit code.
run_job() { # VERB WORDS
    prepare
    case "$1" in
    eval | logprobs) ranks_of "$@" ;;
    *) step+=(--nodes=1 --ntasks=1 megatron-longctx "$@") ;;
    esac
    say "job $SLURM_JOB_ID, first node ${nodes[0]}, ${step[*]}"
    attend "${step[@]}"
}
