#compdef trainer launch.sh
# Completion of trainer for zsh; made by: @PROGRAM@ completion zsh
@FOUND@
_trainer() {
    local -aU found
    found=(${(f)"$(emulate sh; _trainer_found "$PREFIX" "${(@)words[1,CURRENT-1]}")"})
    if [[ $PREFIX == *=* ]]; then
        compset -P '*='
        found=(${found#*=})
    fi
    compadd -- ${found:#*=}
    compadd -S '' -- ${(M)found:#*=}
    (( $#found )) || _files
}
autoload -Uz compinit
(( $+functions[compdef] )) || compinit
compdef _trainer trainer launch.sh
