#!/usr/bin/env bash
# Two hosts on this machine, as network namespaces joined by a cable (veth): train across them with
# launch/torchrun_multinode.sh, cut the cable, see what the run says, mend it, and train to the end.
# Needs root and iproute2.
#
#   tests/two_hosts.sh DIR [train_llm flag ...]
set -euo pipefail
dir=$(realpath "${1:?usage: $0 DIR [train_llm flag ...]}")
shift
cd "$(dirname "$0")/.."
steps=400 timeout=20 run_dir=$dir/run
small=(
    --hidden-size 32 --intermediate-size 64 --num-hidden-layers 2 --num-attention-heads 4
    --num-key-value-heads 2 --seq-len 32 --dataset synthetic --wandb disabled
    --log-every 1 --eval-every 0 --checkpoint-every 25
)
rm -rf "$run_dir"
mkdir -p "$dir"

clean() {
    jobs -p | xargs -r kill 2> /dev/null || true
    wait
    for host in host0 host1; do
        ip netns del $host 2> /dev/null || true
        rm -rf /etc/netns/$host
    done
}
trap clean EXIT
ip link add cable0 type veth peer name cable1
for i in 0 1; do
    ip netns add host$i
    ip link set cable$i netns host$i
    ip -n host$i addr add 10.99.0.$((i + 1))/24 dev cable$i
    ip -n host$i link set lo up
    ip -n host$i link set cable$i up
    mkdir -p /etc/netns/host$i
    printf '127.0.0.1 localhost\n10.99.0.1 host0\n10.99.0.2 host1\n' > /etc/netns/host$i/hosts
done

start() {
    pids=()
    for i in 0 1; do
        PET_NPROC_PER_NODE=2 ip netns exec host$i unshare --uts bash -c \
            "hostname host$i && exec launch/torchrun_multinode.sh 2 $i host0:29500 \"\$@\"" host \
            train_llm.py --steps $steps --comm-timeout $timeout --run-dir "$run_dir" "${small[@]}" "${@:2}" \
            > "$dir/host$i.$1.log" 2>&1 &
        pids+=($!)
    done
}
rows() { [ ! -e "$run_dir/metrics.jsonl" ] || wc -l < "$run_dir/metrics.jsonl"; }
until_rows() {
    until [ "$(rows)" -ge "$1" ] 2> /dev/null; do
        kill -0 "${pids[0]}" "${pids[1]}" || { tail "$dir"/host*.log; exit 1; }
        sleep 0.5
    done
}

echo "training on host0 and host1, 2 processes each"
start first "$@"
until_rows 60
echo "step $(rows): the cable is cut"
ip -n host1 link set cable1 down
SECONDS=0 codes=()
for pid in "${pids[@]}"; do
    code=0
    wait "$pid" || code=$?
    codes+=("$code")
done
echo "both ended after $SECONDS s with exit codes ${codes[*]} (--comm-timeout $timeout):"
grep -h "train_llm.py: error" "$dir"/host?.first.log
cat "$run_dir/status.json"
[ "${codes[0]}" != 0 ] && [ "${codes[1]}" != 0 ]

ip -n host1 link set cable1 up
echo "the cable is mended: the same commands again"
start second "$@"
wait "${pids[0]}"
wait "${pids[1]}"
grep -h "resumed from" "$dir/host0.second.log"
grep '"state"' "$run_dir/status.json"
[ "$(sed -E 's/.*"step": ([0-9]+),.*/\1/' "$run_dir/metrics.jsonl")" = "$(seq $steps)" ]
echo "metrics.jsonl has each of the $steps steps once"
