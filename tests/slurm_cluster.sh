#!/usr/bin/env bash
# A Slurm of two nodes, gpu-a1 and gpu-a2, on this machine, with four GPUs each that are no GPUs;
# besides, a partition of 512 nodes that never answer, for sbatch --test-only. Needs root, and
#   apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
#
#   tests/slurm_cluster.sh start DIR PORT     (PORT and the three after it are free)
#   export SLURM_CONF=DIR/slurm.conf
#   tests/slurm_cluster.sh stop DIR
set -euo pipefail
export PATH=$PATH:/usr/sbin
dir=${2:?usage: $0 start DIR PORT, or stop DIR}

if [ "$1" = stop ]; then
    for file in "$dir"/*.pid; do
        [ ! -e "$file" ] || kill "$(cat "$file")" 2> /dev/null || true
    done
    exit
fi

port=${3:?} host=$(hostname -s)
mkdir -p "$dir"/state "$dir"/spool-gpu-a{1,2}
install -d -o munge -g munge /run/munge /var/log/munge /var/lib/munge /etc/munge
if [ ! -s /etc/munge/munge.key ]; then
    install -o munge -g munge -m 400 <(head -c 1024 /dev/urandom) /etc/munge/munge.key
fi
if ! munge -n > /dev/null 2>&1; then
    su -s /bin/bash munge -c /usr/sbin/munged
    cp /run/munge/munged.pid "$dir"
fi
cat > "$dir/slurm.conf" << CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
SlurmctldPort=$port
SlurmdPort=$((port + 1))
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
ReturnToService=2
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=30
MinJobAge=3600
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=gpu-a[1-2] NodeAddr=127.0.0.1 NodeHostname=$host Port=[$((port + 2))-$((port + 3))] CPUs=$(nproc) RealMemory=2000 Gres=gpu:4 State=UNKNOWN
NodeName=gpu-b[001-512] NodeAddr=127.0.0.1 NodeHostname=$host Port=[30001-30512] CPUs=96 RealMemory=2000 Gres=gpu:8 State=CLOUD
PartitionName=debug Nodes=gpu-a[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4 PriorityTier=1
PartitionName=urgent Nodes=gpu-a[1-2] MaxTime=INFINITE State=UP OverSubscribe=FORCE:4 PriorityTier=10 PreemptMode=OFF
PartitionName=large Nodes=gpu-b[001-512] MaxTime=INFINITE State=UP
CONF
# Files that exist everywhere, so that no driver is needed.
echo "NodeName=gpu-a[1-2] Name=gpu Count=4 File=/dev/tty[0-3]
NodeName=gpu-b[001-512] Name=gpu Count=8 File=/dev/tty[0-7]" > "$dir/gres.conf"
export SLURM_CONF=$dir/slurm.conf
slurmctld -c
# Each slurmd has a host name of its own, and a hosts file that knows both.
{ cat /etc/hosts; echo "127.0.0.1 gpu-a1 gpu-a2"; } > "$dir/hosts"
for node in gpu-a1 gpu-a2; do
    unshare --mount --uts bash -c \
        "mount --bind $dir/hosts /etc/hosts && hostname $node && exec slurmd -N $node"
done
until [ "$(sinfo --noheader --partition=debug --Node --states=idle | wc -l)" = 2 ]; do sleep 0.2; done
