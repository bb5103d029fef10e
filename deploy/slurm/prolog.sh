#!/usr/bin/env bash
# Prolog of slurmd, as root on each host of a job, before it starts:
#
#   slurm.conf:  Prolog=/etc/slurm/rankscope-prolog.sh   PrologFlags=Alloc
#
# It makes the job's spool and drains a host that is not fit to train. The agent of the host
# (deploy/systemd) sends what is recorded there.
set -u

rankscope=${RANKSCOPE_COMMAND:-/opt/rankscope/bin/rankscope}
spools=${RANKSCOPE_SPOOLS:-/dev/shm/rankscope}

# The folder is the job's user's, and the agent, which is root, reads it.
install -d -m 1777 "$spools"

[ -x "$rankscope" ] || exit 0
# At most 5 seconds. A status of 1 drains the host, and Slurm starts the job elsewhere.
HOME=/root timeout 30 "$rankscope" doctor --before-job
status=$?
# Only what the examination found drains a host, not an examination that could not run.
[ "$status" -ne 1 ] || exit 1
exit 0
