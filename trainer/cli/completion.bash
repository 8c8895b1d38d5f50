# Completion of trainer for bash; made by: @PROGRAM@ completion bash
@FOUND@
_trainer() {
    local typed=${COMP_LINE:0:COMP_POINT} breaks before
    local word=${typed##*[[:space:]]}
    read -ra before <<<"${typed%"$word"}"
    mapfile -t COMPREPLY < <(_trainer_found "$word" "${before[@]}" | sort -u)
    case ${COMPREPLY[0]-} in *=) compopt -o nospace 2>/dev/null || : ;; esac
    breaks=${word%"${word##*[=:]}"} # bash takes what stands before = and : as words of their own
    COMPREPLY=("${COMPREPLY[@]#"$breaks"}")
}
complete -o default -F _trainer trainer launch.sh
