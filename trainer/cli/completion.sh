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
            case $command in runs | plan) _trainer_match "$word" --json ;; submit) _trainer_match "$word" --go ;; esac
            return
            ;;
    esac
    if [ $first = 1 ]; then _trainer_match "$word" $commands; fi
    if [ "$command$task" = submit ]; then _trainer_match "$word" slurm; fi
    case $command in
@OWN@
        runs)
            case $task in
                "") _trainer_match "$word" show delete ;;
                show | delete)
                    if [ "$task $bare" != "show 2" ]; then _trainer_named "$word"; fi
                    if [ "$task" = delete ]; then _trainer_match "$word" yes=; fi
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
