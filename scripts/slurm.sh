#!/usr/bin/env bash
#SBATCH --job-name=spes_swarm
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@300
# Trains on the nodes of a Slurm job: every node is one peer, with a rank for each of its GPUs. Submit it from here:
#
#   sbatch --nodes 4 --gpus-per-node 8 --cpus-per-task 64 --time 24:00:00 scripts/slurm.sh runs/big --config my-run.yaml
#
# The first argument is a directory that all nodes share; all others are arguments of `join`. Node N keeps its peer in
# DIRECTORY/node-N, so the same command in a later job resumes the run. The first node founds the run and gives the
# others its address, unless --initial-peers names peers elsewhere. Five minutes before the time limit the peers are
# told to leave. A node that fails takes only its own peer with it.
set -euo pipefail

die() {
    echo "slurm: $1" >&2
    exit 2
}

# Waits for the founder's addresses in its metrics, and writes them to a file for the other nodes, one per line.
pass_on_address() { # METRICS KNOWN_LINES FOUNDER_PID FILE
    local event addresses
    until event=$(tail -n "+$(($2 + 1))" "$1" 2>/dev/null | grep -m1 '"event": "listening"'); do
        kill -0 "$3" 2>/dev/null || { touch "$4.failed" && return; }
        sleep 1
    done
    addresses=$(grep -o '/ip[^"]*' <<<"$event")
    { grep -v '^/ip4/127\.' <<<"$addresses" || echo "$addresses"; } >"$4.new"
    mv "$4.new" "$4"
}

run_peer() { # on each node: DIRECTORY [ARGUMENTS]
    local directory=$1 ranks=${SLURM_GPUS_ON_NODE:-1} python=$SLURM_SUBMIT_DIR/.venv/bin/python
    shift
    local output=$directory/node-$SLURM_NODEID address=$directory/address-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
    local threads=$((${SLURM_CPUS_PER_TASK:-1} / ranks))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
    local peers=()
    if [[ " $* " == *" --initial-peers"* ]]; then
        :
    elif [ "$SLURM_NODEID" = 0 ]; then
        local metrics=$output/metrics.jsonl known=0
        [ ! -e "$metrics" ] || known=$(wc -l <"$metrics")
        pass_on_address "$metrics" "$known" $$ "$address" &
    else
        until [ -s "$address" ]; do
            [ ! -e "$address.failed" ] || die "node $SLURM_NODEID: the first node could not found the run"
            sleep 1
        done
        mapfile -t peers <"$address"
        peers=(--initial-peers "${peers[@]}")
    fi
    # torchrun passes the signal on, and by default leaves a peer only half a minute for its last round.
    exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" --shutdown-timeout 240 \
        -m spes_swarm.join --output-dir "$output" "${peers[@]}" "$@"
}

[ -n "${SLURM_JOB_ID:-}" ] || die "not in a Slurm job: submit this script with sbatch"
[ $# -ge 1 ] && [[ $1 != -* ]] || die "give a directory that all nodes share, then the arguments of join"
[ -x "$SLURM_SUBMIT_DIR/.venv/bin/python" ] ||
    die "$SLURM_SUBMIT_DIR has no .venv: submit from the repository, after bash scripts/setup.sh"
mkdir -p "$1"
directory=$(realpath "$1")
shift
# Slurm copies this script to the first node only, so the others get the functions as text.
exec srun --ntasks-per-node=1 --kill-on-bad-exit=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    bash -c "set -euo pipefail; $(declare -f die pass_on_address run_peer); run_peer \"\$@\"" run_peer "$directory" "$@"
