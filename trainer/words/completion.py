"""`python -m trainer completion bash|zsh`: a script that completes commands, recipes, keys and values at the Tab key.

The lists are in the script, so that no Python starts at a Tab.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.errors import RecipeError
from trainer.recipe import shipped_recipes
from trainer.words.commands import COMMANDS
from trainer.words.guide import topics
from trainer.words.keys import EXPORTS, FOLDERS, OWN, choices, keys
from trainer.words.reading import program

SHELLS = ("bash", "zsh")

_BASH = r"""# Completion of trainer for bash; made by: python -m trainer completion bash
_trainer_words='@FIRST@'
_trainer_keys='@KEYS@'
_trainer_values='@VALUES@'

_trainer() {
    local typed=${COMP_LINE:0:COMP_POINT} found="" breaks
    local word=${typed##*[[:space:]]}
    case $word in
        *=*)
            local key=${word%%=*} value
            for value in $_trainer_values; do
                case $value in "$key="*) found+=" $value" ;; esac
            done
            case " @FOLDERS@ " in
                *" $key "*) while IFS= read -r value; do found+=" $key=$value"; done < <(compgen -f -- "${word#*=}") ;;
            esac
            ;;
        *) case $typed in *" guide "*) found='@TOPICS@' ;; *) found="$_trainer_keys $_trainer_words" ;; esac ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$found" -- "$word")
    case ${COMPREPLY[0]-} in *=) compopt -o nospace 2>/dev/null || : ;; esac
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
# Completion of trainer for zsh; made by: python -m trainer completion zsh
_trainer() {
    local -a first keys values
    first=(@FIRST@)
    keys=(@KEYS@)
    values=(@QUOTED@)
    if [[ $PREFIX == *=* ]]; then
        local key=${PREFIX%%=*}
        compset -P '*='
        compadd -- ${${(M)values:#$key=*}#*=}
        case " @FOLDERS@ " in *" $key "*) _files ;; esac
    elif (( ${words[(I)guide]} )); then
        compadd -- @TOPICS@
    else
        compadd -- $first
        compadd -S '' -- $keys
    fi
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
    own = dict.fromkeys([*(word for words in OWN.values() for word in words), "format"])
    names = [f"{name}=" for name in (*own, *(key for key in keys() if key not in own))]
    values = [f"recipe={name}" for name in shipped_recipes()] + [f"format={name}" for name in EXPORTS]
    values += [f"{key}={value}" for key, allowed in choices().items() for value in allowed]
    text = _BASH if shell == "bash" else _ZSH
    for mark, found in (
        ("FIRST", COMMANDS),
        ("KEYS", names),
        ("VALUES", values),
        ("FOLDERS", FOLDERS),
        ("TOPICS", tuple(topics())),
    ):
        text = text.replace(f"@{mark}@", " ".join(found))
    return text.replace("@QUOTED@", " ".join(f"'{value}'" for value in values))
