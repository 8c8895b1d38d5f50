#!/usr/bin/env bash
# Install on first use, then run: ./launch.sh recipe=digits. Works from any folder; recipes and runs are relative to yours.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
venv=$here/.venv
pins=""   # what to ask pip for beside pyproject.toml
extras="" # [test] installs what the tests need, too

usage() {
    cat <<'TEXT'
usage: ./launch.sh recipe=NAME [key=value ...]    Train (on every GPU; without one, in two processes)
       ./launch.sh evaluate RUN                   Evaluate a trained run again
       ./launch.sh runs                           List the runs below the folder runs; also show RUN, delete RUN
       ./launch.sh export RUN format=onnx         Export a trained model to a file for other programs
       ./launch.sh cache                          List the caches of decoded photos and of features
       ./launch.sh submit slurm recipe=NAME       Print the batch script that SLURM needs
       ./launch.sh doctor                         Show what this machine offers for training and what is wrong with it
       ./launch.sh prove                          Check that this machine trains correctly and measure how fast
       ./launch.sh recipes                        List the recipes that come with the package; also recipes NAME
       ./launch.sh guide                          Answer questions: which mode, out of memory, your photos, ...
       ./launch.sh tensorboard                    Show the curves of runs in a browser
       ./launch.sh COMMAND --help                 Explain these, and compare, sweep, plan, predict, completion, version
       ./launch.sh test [--slow] [pytest args]    Test the installation; --slow takes longer, --all hours
       ./launch.sh test --versions[=lowest]       Train in every mode with the lowest and the newest torch, beside .venv

The first use makes .venv beside this script and installs into it, with uv where present; pip's and uv's own
variables choose the index and the build. Read as well: NPROC, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, torchrun's
own (PET_NPROC_PER_NODE and so on), and SLURM's variables under srun.

recipes:
TEXT
    local file first
    for file in "$here"/recipes/*.yaml; do
        IFS= read -r first <"$file" || true
        printf '  %-18s %s\n' "$(basename "$file" .yaml)" "${first#\# }"
    done
}

# What an installation depends on: the dependencies, and where it stands (an environment cannot be moved).
stamp() {
    cksum <"$here/pyproject.toml"
    echo 2 # changes with what `install` does
    printf '%s\n' "$pins" "$here"
}

installed() {
    [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.installed$extras" 2>/dev/null)" = "$(stamp)" ]
}

find_python() {
    local name
    for name in python3.14 python3.13 python3.12 python3.11 python3; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$name"
            return
        fi
    done
    echo "launch.sh: Python 3.11 or newer with its venv module is needed and none of python3.14, python3.13," \
        "python3.12, python3.11, python3 is one: install it (Debian, Ubuntu: apt install python3-venv) or install uv" >&2
    exit 3
}

# An installation that was cut short, lost its Python, or stood elsewhere.
spoilt() {
    [ -e "$venv/.installing" ] || [ ! -x "$venv/bin/python" ] ||
        { [ -f "$venv/.installed" ] && [ "$(tail -n 1 "$venv/.installed")" != "$here" ]; }
}

install() {
    local python="" with=pip folder
    if command -v uv >/dev/null; then
        with=uv
    elif spoilt; then
        python=$(find_python)
    fi
    echo "launch.sh: installing into $venv with $with (a few minutes, once)" >&2
    if spoilt; then
        rm -rf "$venv"
    fi
    mkdir -p "$venv"
    touch "$venv/.installing"
    rm -f "$venv"/.installed*
    if [ "$with" = uv ]; then
        [ -x "$venv/bin/python" ] || (cd "$here" && uv venv --quiet --allow-existing --python '>=3.11' "$venv")
        uv pip install --quiet --python "$venv/bin/python" -e "$here$extras" $pins
    else
        [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
        "$venv/bin/python" -P -m pip install -qq --disable-pip-version-check -e "$here$extras" $pins
    fi
    # Seen from the folder above, a clone named trainer is a package without files, which would hide the real one.
    for folder in "$venv"/lib/python3.*/site-packages; do
        printf '%s\n' "$here" >"$folder/trainer-clone.pth"
    done
    stamp | tee "$venv/.installed$extras" >"$venv/.installed"
    rm "$venv/.installing"
    echo "launch.sh: installed" >&2
}

ensure() {
    if ! installed; then
        exec 9>"$venv.lock"
        if command -v flock >/dev/null; then
            flock -n 9 || { echo "launch.sh: waiting for another installation" >&2 && flock 9; }
        fi
        installed || install
        exec 9>&-
    fi
}

# What pyproject.toml declares as NAME>=VERSION, as NAME==VERSION.
least() {
    sed -n "s/^ *\"$1>=\([0-9.]*\)\",\$/$1==\1/p" "$here/pyproject.toml"
}

# Every mode and schedule with other versions of torch, each in an environment of its own.
versions() {
    local which
    for which in "$@"; do
        case $which in
            lowest) pins="$(least torch) $(least torchvision)" ;;
            newest) pins="--upgrade torch torchvision" && rm -f "$here"/.venv-newest/.installed* ;; # since then newer
            *)
                echo "launch.sh: --versions=$which: lowest and newest are known" >&2
                exit 2
                ;;
        esac
        venv=$here/.venv-$which
        ensure
        "$venv/bin/python" -c 'import torch; print("torch", torch.__version__, flush=True)'
        "$venv/bin/python" -m pytest --numprocesses="$(workers)" --all tests/test_smoke.py
    done
}

# How many tests run at once: some wait for others' ends. Each may start four processes.
workers() {
    local cores
    cores=$(nproc 2>/dev/null || echo 2)
    echo $((cores < 6 ? cores + 2 : 8))
}

# One launcher a node, whatever the tasks per node.
if [ -n "${SLURM_STEP_ID:-}" ] && [ "${SLURM_LOCALID:-0}" != 0 ]; then
    exit 0
fi

case ${1:-help} in
    help | --help | -h)
        usage
        exit 0
        ;;
esac

if [ "$1" = test ]; then extras="[test]"; fi

case $1-${2:-} in
    test---versions)
        cd "$here"
        versions lowest newest
        exit
        ;;
    test---versions=*)
        cd "$here"
        versions "${2#*=}"
        exit
        ;;
esac

ensure

case $1 in
    test)
        shift
        cd "$here"
        unset PYTHONDONTWRITEBYTECODE # as images set it: each process would compile all tests anew
        # Only -m gpu sees this machine's cards: other tests are the same on every machine.
        if [ -e /dev/nvidiactl ] && [ $# = 0 ]; then "$venv/bin/python" -m pytest --numprocesses=2 -m gpu; fi
        exec "$venv/bin/python" -m pytest --numprocesses="$(workers)" --dist=worksteal "$@"
        ;;
    *)
        TRAINER_COMMAND=$(printf %q "$0") # what an error tells to type
        export TRAINER_COMMAND
        hold=() # Ctrl-C while Python itself starts, which would show a traceback, waits until the trainer hears it
        if env --block-signal=INT true 2>/dev/null; then hold=(env --block-signal=INT); fi
        exec ${hold[@]+"${hold[@]}"} "$venv/bin/python" -P -m trainer "$@"
        ;;
esac
