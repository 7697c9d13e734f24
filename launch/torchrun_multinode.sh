#!/usr/bin/env bash
# Start a program on one of several nodes: run this on each node, with the node's own number.
#
#   launch/torchrun_multinode.sh NNODES NODE_RANK MASTER_ADDR[:PORT] PROGRAM [FLAG ...]
#
# node1$ launch/torchrun_multinode.sh 2 0 node1 train_llm.py --recipe llama3_8b --tp 4
# node2$ launch/torchrun_multinode.sh 2 1 node1 train_llm.py --recipe llama3_8b --tp 4
#
# Paths among the flags start in the repository.
# MASTER_ADDR is node 0's name as the other nodes know it; PORT (29500) is free there. Each node
# starts one process per GPU, or per core where there is none. torchrun reads every option of its
# own from the environment too: PET_NPROC_PER_NODE=4 starts four processes, PET_MAX_RESTARTS=3
# starts them again after a failure (on every node, or they do not meet again).
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

if ! [ -e pyproject.toml ]; then
    echo "$0: this is an installed copy in $PWD: clone the repository, and run it there" >&2
    exit 2
fi
if [ $# -lt 4 ] || ! [[ $1 =~ ^[1-9][0-9]*$ && $2 =~ ^[0-9]+$ ]] || [ "$2" -ge "$1" ]; then
    echo "usage: $0 NNODES NODE_RANK(0..NNODES-1) MASTER_ADDR[:PORT] PROGRAM [FLAG ...]" >&2
    exit 2
fi
nnodes=$1 node_rank=$2 master=$3
shift 3

if [ "$nnodes" = 1 ]; then
    # The kernel chooses the port: two runs on one node never want the same.
    rendezvous=(--standalone)
else
    port=29500
    # An IPv6 address with a port stands in brackets.
    if [[ $master =~ ^\[(.+)\](:([0-9]+))?$ ]]; then
        master=${BASH_REMATCH[1]} port=${BASH_REMATCH[3]:-$port}
    elif [[ $master =~ ^([^:]+):([0-9]+)$ ]]; then
        master=${BASH_REMATCH[1]} port=${BASH_REMATCH[2]}
    fi
    # Node ranks are given, not found by order of arrival: global rank 0 is on the master.
    rendezvous=(
        --nnodes "$nnodes" --node-rank "$node_rank" --master-addr "$master" --master-port "$port"
    )
fi
export PET_NPROC_PER_NODE=${PET_NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-auto}}
# More threads change the order of sums on a CPU, and are of no use on a GPU.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Seconds that the ranks have to save after a SIGTERM until torchrun kills them.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
# torchrun would die of them, and leave its ranks behind; they have handlers of their own.
trap '' USR1 USR2
exec python -m torch.distributed.run "${rendezvous[@]}" "$@"
