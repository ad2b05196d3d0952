#!/usr/bin/env bash
# The launch scripts on a real Slurm (`make test-slurm`). Installs Debian's where root may, else says why not and skips.
# Arguments: for pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export PATH="$PATH:/usr/sbin:/sbin" DEBIAN_FRONTEND=noninteractive
if ! command -v slurmctld slurmd munged mungekey >/dev/null; then
    if [[ $EUID != 0 ]] || ! command -v apt-get >/dev/null; then
        echo "test-slurm: SKIPPED: Slurm is not installed, and only root can install it here (apt-get install slurm-wlm munge)"
        exit 0
    fi
    echo "== installing Slurm =="
    log="$(mktemp)"
    # A machine without a mirror: the daemons that packages start are not wanted either.
    if ! (apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2) >"$log" 2>&1; then
        echo "test-slurm: SKIPPED: apt-get cannot install slurm-wlm and munge: $(tail -n 1 "$log")"
        exit 0
    fi
fi
exec "${PYTHON:-python3}" -m pytest tests/slurm/real_slurm.py "$@"
