# Completion of trainer for bash; made by: @PROGRAM@ completion bash
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
