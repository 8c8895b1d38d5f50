"""`python -m trainer completion bash|zsh`: a script that completes what can stand at the cursor, at the Tab key.

Commands, recipes, keys, values and topics are lists in the script, and runs are folders that the shell sees, so that no
Python starts at a Tab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.cli.command_names import COMMANDS
from trainer.cli.grammar import program
from trainer.cli.guide import topics
from trainer.cli.known_keys import EXPORTS, FOLDERS, OWN
from trainer.errors import RecipeError
from trainer.recipe import shipped_recipes
from trainer.recipe.checks import refused_schedules
from trainer.recipe.known_names import DATASETS, SMALL_MODELS, TASKS, torchvision_classifiers
from trainer.recipe.reflection import choices, defaults, sections

SHELLS = ("bash", "zsh")
OTHER_FOLDERS = [key for key in FOLDERS if key not in ("recipe", "checkpoint", "model.init_from", "measured")]

# What both shells ask. It is written in what they share: zsh runs it as sh.
_FOUND = r"""
_trainer_commands='@COMMANDS@'
_trainer_recipes='@RECIPES@'
_trainer_keys='@KEYS@'
_trainer_values='@VALUES@'

# Those of the words $2... that begin with $1, a line each.
_trainer_match() {
    local start=$1 each
    shift
    for each do
        case $each in "$start"*) printf '%s\n' "$each" ;; esac
    done
}

# The paths that begin with $2, each after $1; of files those with the endings $3, or all. A folder ends with a slash,
# but for a run's.
_trainer_paths() {
    local each
    for each in "$2"*; do
        case $each in *[[:space:]]*) continue ;; esac # only the shell itself knows how to quote it
        if [ -f "$each/recipe.yaml" ]; then
            printf '%s\n' "$1$each"
        elif [ -d "$each" ]; then
            printf '%s\n' "$1$each/"
        elif [ -e "$each" ]; then
            case " $3 " in "  " | *" ${each##*.} "*) printf '%s\n' "$1$each" ;; esac
        fi
    done
}

# The runs below ./runs that begin with $2, each after $1.
_trainer_runs() {
    local each
    for each in runs/*/recipe.yaml; do
        if [ -f "$each" ]; then
            each=${each%/recipe.yaml}
            case $each in *[[:space:]]*) ;; "$2"*) printf '%s\n' "$1$each" ;; esac
        fi
    done
}

# The runs that begin with $2, each after $1; where there is none, what may be a file of one.
_trainer_trained() {
    local found
    found=$(_trainer_runs "$1" "$2")
    _trainer_match "" ${found:-$(_trainer_paths "$1" "$2" "")}
}

# As above, and also the names of runs without "runs/".
_trainer_named() {
    local each found=""
    if [ -n "$1" ]; then
        for each in $(_trainer_runs "" ""); do
            case ${each#runs/} in "$1"*) found="$found ${each#runs/}" ;; esac
        done
    fi
    _trainer_match "" ${found:-$(_trainer_trained "" "$1")}
}

# Recipes that begin with $2, each after $1: shipped ones, runs and files.
_trainer_recipe() {
    local each
    for each in $_trainer_recipes; do
        case $each in "$2"*) printf '%s\n' "$1$each" ;; esac
    done
    _trainer_runs "$1" "$2"
    for each in $(_trainer_paths "$1" "$2" "yaml yml"); do
        case $each in
            "$1runs/") ;; # whose runs are there already
            */) if [ -n "$2" ]; then printf '%s\n' "$each"; fi ;;
            *) printf '%s\n' "$each" ;;
        esac
    done
}

# What can stand for the value in $1, key=value.
_trainer_value() {
    local key=${1%%=*}
    _trainer_match "$1" $_trainer_values
    case $key in
        recipe | extends) _trainer_recipe "$key=" "${1#*=}" ;;
        checkpoint | model.init_from | measured) _trainer_trained "$key=" "${1#*=}" ;;
        @FOLDERS@) _trainer_paths "$key=" "${1#*=}" "" ;;
    esac
}

# The names of caches on the disk.
_trainer_caches() {
    local each
    for each in "${TRAINER_DATA:-$HOME/.cache/trainer}"/cache/*/about.json; do
        if [ -f "$each" ]; then
            each=${each%/about.json}
            printf '%s\n' "${each##*/}"
        fi
    done
}

# What can stand at the cursor, a line each: $1 is what is typed of it, then come the words before it.
_trainer_found() {
    local word=$1 first=1 command=train commands=$_trainer_commands task="" bare=0 each
    shift
    case " $* " in
        *" -m trainer "*)
            while [ $# -gt 1 ] && [ "$1 $2" != "-m trainer" ]; do shift; done
            shift
            ;;
    esac
    case ${1-} in *launch.sh) commands="$commands tensorboard test" ;; esac
    if [ $# -gt 0 ]; then shift; fi # the program
    for each do
        case $each in
            *=* | -*) ;;
            *)
                if [ $first = 1 ]; then
                    command=$each
                else
                    bare=$((bare + 1))
                    if [ $bare = 1 ]; then task=$each; fi
                fi
                ;;
        esac
        first=0
    done
    case $word in
        *=*)
            _trainer_value "$word"
            return
            ;;
        -*)
            _trainer_match "$word" --help
            case $command in runs | plan) _trainer_match "$word" --json ;; esac
            return
            ;;
    esac
    if [ $first = 1 ]; then _trainer_match "$word" $commands; fi
    case $command in
@OWN@
        runs)
            case $task in
                "") _trainer_match "$word" show compare delete ;;
                show | compare | delete)
                    if [ "$task $bare" != "show 2" ]; then _trainer_named "$word"; fi
                    case $task in compare) _trainer_match "$word" output= ;; delete) _trainer_match "$word" yes= ;; esac
                    ;;
            esac
            ;;
        export)
            if [ $bare = 0 ]; then _trainer_named "$word"; fi
            _trainer_match "$word" format= output= plugin=
            ;;
        prove) _trainer_match "$word" minutes= devices= output= ;;
        cache)
            case $task in
                "") _trainer_match "$word" build verify delete data.cache_dir= ;;
                build) _trainer_match "$word" recipe= $_trainer_keys ;;
                verify | delete)
                    _trainer_match "$word" $(_trainer_caches) data.cache_dir=
                    if [ $task = delete ]; then _trainer_match "$word" yes=; fi
                    ;;
            esac
            ;;
        recipes)
            case $task in
                "")
                    _trainer_match "$word" diff new keys schema
                    if [ -n "$word" ]; then _trainer_recipe "" "$word"; else _trainer_match "" $_trainer_recipes; fi
                    ;;
                diff) if [ $bare -lt 3 ]; then _trainer_recipe "" "$word"; fi ;;
                new)
                    if [ $bare = 1 ]; then _trainer_paths "" "$word" "yaml yml"; fi
                    if [ $bare = 2 ]; then _trainer_match "$word" extends= $_trainer_keys; fi
                    ;;
                keys) if [ $bare = 1 ]; then _trainer_match "$word" @SECTIONS@; fi ;;
                schema) ;;
                *) _trainer_match "$word" $_trainer_keys ;;
            esac
            ;;
        guide) _trainer_match "$word" @TOPICS@ ;;
        completion) if [ $bare = 0 ]; then _trainer_match "$word" @SHELLS@; fi ;;
        help) if [ $bare = 0 ]; then _trainer_match "$word" $_trainer_commands; fi ;;
    esac
}
"""

_BASH = r"""# Completion of trainer for bash; made by: @PROGRAM@ completion bash
@FOUND@
_trainer() {
    local typed=${COMP_LINE:0:COMP_POINT} breaks before
    local word=${typed##*[[:space:]]}
    read -ra before <<<"${typed%"$word"}"
    mapfile -t COMPREPLY < <(_trainer_found "$word" "${before[@]}" | sort -u)
    case ${COMPREPLY[0]-} in *= | */) compopt -o nospace 2>/dev/null || : ;; esac
    breaks=${word%"${word##*[=:]}"}  # bash takes what stands before = and : as words of their own
    COMPREPLY=("${COMPREPLY[@]#"$breaks"}")
}

# python and torchrun: only after "-m trainer"; else what completed them before.
_trainer_after_m() {
    local typed=${COMP_LINE:0:COMP_POINT}
    case $typed in
        *" -m trainer "*) _trainer ;;
        *)
            local before=_trainer_before_${1##*/}
            if [ -n "${!before-}" ] && declare -F "${!before}" >/dev/null; then
                "${!before}" "$@"
            else
                COMPREPLY=()
            fi
            ;;
    esac
}

for _trainer_program in python python3 torchrun; do
    declare -F _completion_loader >/dev/null && _completion_loader "$_trainer_program" 2>/dev/null
    _trainer_previous=$(complete -p "$_trainer_program" 2>/dev/null | sed -n 's/.* -F \([^ ]*\) .*/\1/p')
    if [ "$_trainer_previous" != _trainer_after_m ]; then
        printf -v "_trainer_before_$_trainer_program" %s "$_trainer_previous"
    fi
    complete -o default -o bashdefault -F _trainer_after_m "$_trainer_program"
done
unset _trainer_program _trainer_previous
complete -o default -F _trainer trainer launch.sh
"""

_ZSH = r"""#compdef trainer launch.sh
# Completion of trainer for zsh; made by: @PROGRAM@ completion zsh
@FOUND@
_trainer() {
    local -aU found
    local -a before
    before=("${(@)words[1,CURRENT-1]}")
    found=(${(f)"$(emulate sh; _trainer_found "$PREFIX" "${before[@]}")"})
    if [[ $PREFIX == *=* ]]; then
        compset -P '*='
        found=(${found#*=})
    fi
    compadd -- ${found:#*[=/]}
    compadd -S '' -- ${(M)found:#*[=/]}
    (( $#found )) || _files
}

# python and torchrun: only after "-m trainer".
_trainer_after_m() {
    if [[ "${words[*]}" == *" -m trainer "* ]]; then _trainer; else _normal -p python; fi
}

autoload -Uz compinit
(( $+functions[compdef] )) || compinit
compdef _trainer trainer launch.sh
compdef _trainer_after_m python python3 torchrun
"""


def command(words: Sequence[str]) -> int:
    """Print the script for a shell."""
    if list(words) not in [[shell] for shell in SHELLS]:
        given = f"'{' '.join(words)[:40]}' is not a shell that completion knows:" if words else "for which shell?"
        raise RecipeError(f"{given} type {program()} completion bash, or zsh")
    print(script(words[0]), end="")
    return 0


def script(shell: str) -> str:
    """The script for bash or zsh, which completes what this version knows."""
    marks = {
        "COMMANDS": COMMANDS,
        "RECIPES": shipped_recipes(),
        "KEYS": [f"{key}=" for key in defaults()],
        "VALUES": [f"{key}={value}" for key, allowed in _values().items() for value in allowed],
        "SECTIONS": [*sections(), *defaults()],
        "TOPICS": topics(),
        "SHELLS": SHELLS,
    }
    text = _FOUND.strip("\n").replace("@OWN@", "\n".join(_commands()))
    for mark, words in marks.items():
        text = text.replace(f"@{mark}@", " ".join(words))
    text = text.replace("@FOLDERS@", " | ".join(OTHER_FOLDERS))
    return (_BASH if shell == "bash" else _ZSH).replace("@FOUND@", text).replace("@PROGRAM@", program())


def _commands() -> list[str]:
    """The branches of those commands that take keys: words of their own, and the recipe's."""
    return [
        f'        {name}) _trainer_match "$word" {" ".join(f"{word}=" for word in words)} $_trainer_keys ;;'
        for name, words in OWN.items()
    ]


def _values() -> Mapping[str, Sequence[str]]:
    """What can be typed for a key, where there is a list of it."""
    known = choices()
    refused = refused_schedules()
    return {
        **known,
        "pipeline.schedule": [name for name in known["pipeline.schedule"] if name not in refused],
        "model.name": [*SMALL_MODELS, *torchvision_classifiers()],
        "data.name": DATASETS,
        "task.name": TASKS,
        "measured": ("here",),
        "format": EXPORTS,
        "yes": ("true", "false"),
    }
