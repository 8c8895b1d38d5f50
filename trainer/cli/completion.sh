# Print the words that begin with $_trainer_word, one per line.
_trainer_match() {
    local each
    for each do
        case $each in "$_trainer_word"*) printf '%s\n' "$each" ;; esac
    done
}

# Print what can stand at the cursor, one word per line. $1 is the typed part of the word, and the words before it follow.
_trainer_found() {
    local _trainer_word=$1 command=train _trainer_keys='@KEYS@'
    shift
    case " $* " in
        *" -m trainer "*)
            while [ $# -gt 1 ] && [ "$1 $2" != "-m trainer" ]; do shift; done
            shift
            ;;
    esac
    if [ $# -gt 0 ]; then shift; fi # the program
    case ${1-} in "" | *=* | -*) ;; *) command=$1 ;; esac
    case $_trainer_word in *=*) _trainer_match @VALUES@ && return ;; -*) _trainer_match --help && return ;; esac
    if [ $# = 0 ]; then _trainer_match @COMMANDS@; fi
    case $command in
        @OWN@
        recipes) _trainer_match keys schema @RECIPES@ $_trainer_keys ;;
        guide) _trainer_match @TOPICS@ ;;
        completion) _trainer_match @SHELLS@ ;;
        help) _trainer_match @COMMANDS@ ;;
    esac
}
