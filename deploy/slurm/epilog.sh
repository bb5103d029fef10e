#!/usr/bin/env bash
# Epilog of slurmd, as root on each host of a job, after it has ended:
#
#   slurm.conf:  Epilog=/etc/slurm/rankscope-epilog.sh
#
# It removes the folders of runs whose rows are all sent, so that /dev/shm does not fill up. What
# the agent has not sent yet stays: a folder is removed only once it has no segment left.
set -u

spools=${RANKSCOPE_SPOOLS:-/dev/shm/rankscope}
run=${SLURM_JOB_ID:?is set by slurmd} # the tracer takes it as the name of the run

folder=$spools/$run
[ -d "$folder" ] && [ ! -L "$folder" ] || exit 0
for _ in $(seq "${RANKSCOPE_EPILOG_TRIES:-20}"); do
    if [ -z "$(find "$folder" -name 'seg-*.rsp' -print -quit)" ]; then
        rm -rf -- "$folder"
        exit 0
    fi
    sleep 1
done
exit 0
