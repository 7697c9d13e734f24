# The same for every job (launch/slurm/run.sh): train on all of its nodes, and requeue it if the run
# stopped before its end. run_dir, flags (of train_llm.py) and srun_options are set above; everything
# about nodes, processes and ports comes from SLURM_*.

if ! nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || [ -z "$nodes" ]; then
    echo "scontrol cannot list the nodes of this job ($SLURM_JOB_NODELIST)" >&2
    exit 1
fi
# The port is below those that the kernel gives to connections, and differs between jobs on a node.
master=${nodes%%$'\n'*}:$((20000 + SLURM_JOB_ID % 12000))
# What sbatch was given, srun does not take by itself.
if [ -n "${SLURM_CPUS_PER_TASK-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
# shellcheck disable=SC2016
step=(
    srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --kill-on-bad-exit=1
    "${srun_options[@]}"
    # Each node expands its own number.
    bash -c 'exec launch/torchrun_multinode.sh "$SLURM_NNODES" "$SLURM_NODEID" "$@"' node
    "$master" train_llm.py "${flags[@]}" --run-dir "$run_dir"
)
if [ "${ENVIRONMENT-}" != BATCH ]; then
    exec "${step[@]}" # in an salloc shell: nothing to requeue, and Ctrl-C goes to the step
fi

# The job's own name also within an array, whose first job id stands for all of its tasks.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
field() {
    sed -nE "s/^ *\"$1\": \"?([^\",]*)\"?,?$/\1/p" "$run_dir/status.json" 2> /dev/null || true
}
before=$(field time) step_before=$(field step)

"${step[@]}" &
pid=$!
# Again and again: ranks that still start up do not hear it.
while kill -0 "$pid" 2> /dev/null; do
    if [ -n "$asked" ]; then scancel --signal=USR1 "$job" || true; fi
    sleep 5 &> /dev/null &
    wait -n "$pid" "$!" || true
done
trap '' USR1
code=0
wait "$pid" || code=$?

# torchrun's own report comes last and says less.
if [ "$(field state)" = failed ] && [ "$(field time)" != "$before" ]; then
    error=$(sed -nE 's/^ *"error": "(.*)",?$/\1/p' "$run_dir/status.json")
    echo "$run_dir failed on rank $(field rank) in step $(field step): $error" >&2
fi

# Requeued is what stopped on purpose, in a start of this job, with progress made: not what has
# finished, has failed, never began, or was cancelled.
if [ "$(field state)" = stopped ] && [ "$(field time)" != "$before" ]; then
    state=unknown # a busy controller does not answer at once
    for _ in 1 2 3; do
        state=$(squeue --noheader --jobs="$job" --format=%T) && break
        sleep 5
    done
    if [ "$(field step)" = "$step_before" ]; then
        echo "not requeued: $run_dir stopped where it had stopped before, at step $step_before"
    elif ! grep -qs "\"job $SLURM_JOB_ID\"" "$run_dir/run.json"; then
        echo "not requeued: it is not this job that has stopped in $run_dir"
    elif [ "$state" != RUNNING ]; then
        echo "not requeued: the job is $state"
    else
        # Said first: to be requeued ends this script.
        echo "$run_dir stopped at step $(field step): job $job is requeued"
        scontrol requeue "$job" || echo "job $job cannot be requeued: submit it again"
    fi
fi
