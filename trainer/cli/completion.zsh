#compdef trainer launch.sh
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
