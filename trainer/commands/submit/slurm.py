"""A batch script for SLURM: one task a node, which starts that node's ranks; what stops continues in its folder."""

from __future__ import annotations

import shlex

from trainer.commands.submit.submission import Submission
from trainer.errors import PeerError, Preempted

LOST, STOPPED = PeerError.code, Preempted.code  # exit codes after which another try continues


def script(submission: Submission) -> str:
    """The file that sbatch takes."""
    options = {
        "job-name": submission.name,
        "nodes": submission.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": submission.gpus or None,
        "cpus-per-task": submission.cpus,
        "mem": submission.options.get("memory", "").removesuffix("iB") or None,
        "time": submission.options["time"],
        "partition": submission.options.get("partition"),
        "account": submission.options.get("account"),
        "array": f"0-{len(submission.variants) - 1}" if submission.variants != ("",) else None,
        "signal": f"USR1@{submission.saving}",
        "open-mode": "append",
    }
    lines = ["#!/bin/bash", f"# {submission.comment}", "#SBATCH --requeue"]
    lines += [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
    words, varied = [*submission.words, f"nproc={submission.nproc}"], ""
    if submission.variants == ("",):
        lines.append(f"folder={shlex.quote(submission.output)}")
    else:
        varied = ' "$variant"'
        lines += [f"variants=({shlex.join(submission.variants)})", f"folders=({shlex.join(submission.folders)})"]
        lines += ["variant=${variants[SLURM_ARRAY_TASK_ID]}", "folder=${folders[SLURM_ARRAY_TASK_ID]}"]
    lines += [
        "",
        "# The job runs in the folder and the environment in which sbatch was typed.",
        'mkdir -p "$folder" && exec >>"$folder/slurm-$SLURM_JOB_ID.log" 2>&1 || exit 3',
        f"# {submission.saving} s before the time limit the ranks get USR1, save and exit {STOPPED}. The first task",
        "# to end does not have the others killed while they save; they notice a lost node by themselves.",
        f"srun --cpus-per-task={submission.cpus} --kill-on-bad-exit=0 --wait=0 \\",
        f'    {submission.program} {shlex.join(words)}{varied} "output=$folder" resume=auto',
        "code=$?",
        "",
        f"# {STOPPED}: stopped by a signal, and saved. {LOST}: a rank or a node was lost. Others would only recur.",
        f"if [ $code = {STOPPED} ] || [ $code = {LOST} ]; then",
        f"    if [ ${{SLURM_RESTART_COUNT:-0}} -lt {submission.requeues} ]; then",
        '        scontrol requeue "$SLURM_JOB_ID" && exit',
        "    fi",
        f'    echo "not queued again (at most {submission.requeues} times); the same words continue it"',
        "fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"
