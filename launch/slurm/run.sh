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
# Slurm's signal before the time limit comes to this shell alone.
trap 'scancel --signal=USR1 "$job"' USR1
while kill -0 "$pid" 2> /dev/null; do wait "$pid" || true; done
code=0
wait "$pid" || code=$?

# Requeued is what stopped on purpose, in this start, with progress made: not what has finished,
# has failed, never began, or was cancelled.
if [ "$(field state)" = stopped ] && [ "$(field time)" != "$before" ] &&
    [ "$(field step)" != "$step_before" ] &&
    [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ]; then
    echo "$run_dir stopped at step $(field step): job $job is requeued"
    scontrol requeue "$job"
fi
