#!/bin/sh
# Makes .venv at the repository root and installs jaxpaged into it, editable.
#
#   sh scripts/setup.sh [EXTRA ...]      e.g. `sh scripts/setup.sh dev`
#
# Where an NVIDIA driver is present, the matching CUDA build of JAX comes along by itself.
# Promises: a run with nothing to do ends at once; a failed one says why in one line, exits with 1
# and leaves no stamp; running again repairs an environment that was broken or interrupted.
# pip's own words go to .setup.log. $PYTHON, if set, is the interpreter tried first.
set -eu

# What the caller's shell says about another Python or another place to install to is not for .venv.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX VIRTUAL_ENV
export PIP_USER=0
CDPATH='' cd -- "$(dirname -- "$0")/.."
root=$(pwd -P)

log=.setup.log
stamp=.venv/setup-stamp       # four lines: root, Python's version, checksum of pyproject.toml, extras
unfinished=.venv/unfinished   # there while a .venv that this script made is not complete
venv_python=.venv/bin/python
get_python='`pyenv install 3.12` or `uv python install 3.12`'
watcher=''

say() { printf 'setup: %s\n' "$*"; }

stop_watching() {
    [ -n "$watcher" ] || return 0
    kill "$watcher" 2>/dev/null || :
    wait "$watcher" 2>/dev/null || :
    watcher=''
    printf '\r\033[K'
}

die() {
    stop_watching
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# Leave as the signal asks, the watcher ended.
trap stop_watching EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# --- which Python ---------------------------------------------------------------------------------

python=''; python_version=''
too_old=''     # the newest word on an interpreter that is too old, for the message
no_venv=''     # ... and on one that cannot make environments

# What an interpreter says of itself: version, whether it is new enough, whether it can make a venv, and the
# interpreter below it (a pyenv shim or an active venv may go away, or be the .venv that is rebuilt here).
# Valid Python 2 as well: `python` may be one.
probe='
import sys
try:
    import ensurepip, venv
    able = "yes"
except ImportError:
    able = "no"
print("%d.%d.%d" % sys.version_info[:3] + (" new " if sys.version_info >= (3, 12) else " old ") + able)
print(getattr(sys, "_base_executable", None) or sys.executable)
'

# consider COMMAND: takes it as $python if none is chosen yet and this one serves.
consider() {
    [ -z "$python" ] || return 0
    answer=$("$1" -E -c "$probe" 2>/dev/null </dev/null) || return 0
    executable=${answer#*
}
    answer=${answer%%
*}
    case $answer in
        *" new yes") python=$executable; python_version=${answer%% *} ;;
        *" new no") no_venv=${no_venv:-"${answer%% *} $executable"} ;;
        *" old "*) too_old=${too_old:-"${answer%% *} ($executable)"} ;;
    esac
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        consider "$PYTHON"
        [ -n "$python" ] || say "PYTHON=$PYTHON cannot serve (Python 3.12 or newer with venv is needed): looking for another"
    fi
    for candidate in python3.12 python3.13 python3 python; do consider "$candidate"; done
    for candidate in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[2-9]*/bin/python; do consider "$candidate"; done
    [ -z "$python" ] || return 0
    if command -v uv >/dev/null 2>&1; then
        candidate=$(uv python find --no-project --system '>=3.12' 2>>"$log") && consider "$candidate"
        [ -z "$python" ] || return 0
        say "no Python 3.12 here: uv fetches one"
        uv python install 3.12 >>"$log" 2>&1 &&
            candidate=$(uv python find --no-project --managed-python 3.12 2>>"$log") && consider "$candidate"
        [ -z "$python" ] || return 0
    fi
    if [ -n "$no_venv" ]; then
        version=${no_venv%% *}
        die "Python $version (${no_venv#* }) has no venv module: install it (Debian: \`apt install python${version%.*}-venv\`) or get another Python with $get_python, then run again"
    fi
    die "Python 3.12 or newer is needed, found ${too_old:-none}: get it with $get_python, then run again"
}

# --- which CUDA -----------------------------------------------------------------------------------

# Sets $cuda. JAX's minimums: driver 525.60.13 for CUDA 12; driver 580 and compute capability 7.5 for CUDA 13.
choose_cuda() {
    cuda=''
    command -v nvidia-smi >/dev/null 2>&1 || return 0
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || driver=''
    driver=$(printf '%s\n' "$driver" | sed -n 1p)
    case $driver in
        [0-9]*.[0-9]*) ;;
        *) say "nvidia-smi finds no working NVIDIA driver: installing for the CPU"; return 0 ;;
    esac
    major=${driver%%.*}
    minor=${driver#*.}; minor=${minor%%.*}
    if [ "$major" -ge 580 ] && ! any_gpu_before_turing; then
        cuda=cuda13
    elif [ "$major" -gt 525 ] || { [ "$major" -eq 525 ] && [ "$minor" -ge 60 ]; }; then
        cuda=cuda12
    else
        say "NVIDIA driver $driver is older than 525.60, the oldest that JAX runs on: installing for the CPU (update the driver and run again for the GPU)"
    fi
}

any_gpu_before_turing() {
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
        awk '$1 ~ /^[0-9.]+$/ && $1 < 7.5 { old = 1 } END { exit !old }'
}

# --- what is there already ------------------------------------------------------------------------

has_word() { case " $1 " in *" $2 "*) return 0 ;; esac; return 1; }

# The CUDA extra among the given words, if any.
cuda_among() { for word in $1; do case $word in cuda1[23]) printf %s "$word" ;; esac; done; }

# Sets $state: `done` (nothing to do), `update` (install into what is there) or `build` (from nothing).
look_at_venv() {
    state=build; done_extras=''
    [ -e .venv ] && [ ! -e "$unfinished" ] || return 0
    here=$("$venv_python" -E -c "$probe" 2>/dev/null </dev/null) || return 0
    here=${here%%
*}
    case $here in *" new "*) here=${here%% *} ;; *) return 0 ;; esac
    if [ -n "${PYTHON:-}" ]; then
        consider "$PYTHON"
        [ -z "$python" ] || [ "$python_version" = "$here" ] || return 0
    fi
    if [ ! -e "$stamp" ]; then # not made here, and it works: install into it rather than throw it away
        if "$venv_python" -m pip --version >/dev/null 2>&1; then state=update; python_version=$here; fi
        return 0
    fi
    { read -r was_root; read -r was_python; read -r was_sum; read -r done_extras; } <"$stamp" || return 0
    [ "$was_root" = "$root" ] && [ "$was_python" = "$here" ] || return 0
    was_cuda=$(cuda_among "$done_extras")
    [ -z "$cuda" ] || [ -z "$was_cuda" ] || [ "$cuda" = "$was_cuda" ] || return 0
    python_version=$here
    state=update
    [ "$was_sum" = "$sum" ] || return 0
    for extra in $extras; do has_word "$done_extras" "$extra" || return 0; done
    state=done
}

# --- the work -------------------------------------------------------------------------------------

build_venv() {
    find_python
    say "making .venv with Python $python_version ($python)"
    rm -rf .venv 2>>"$log" && mkdir .venv 2>>"$log" && true >"$unfinished" || die "cannot replace $root/.venv: $(tail -n 1 "$log")"
    "$python" -m venv .venv >>"$log" 2>&1 || die "Python could not make .venv: $(tail -n 1 "$log") (all of it: $root/$log)"
}

# On a terminal, shows what pip is at, on one line that is wiped afterwards.
watch_pip() {
    [ -t 1 ] || return 0
    while sleep 1; do
        at=$(sed -n 's/^ *Collecting \([A-Za-z0-9._-]*\).*/fetching \1/p; s/^Installing collected.*/unpacking/p' "$log" | tail -n 1)
        printf '\r\033[K       %s' "$at"
    done &
    watcher=$!
}

install_package() {
    what=jaxpaged
    wanted=$(printf %s "$extras" | tr ' ' ',')
    [ -z "$wanted" ] || what="jaxpaged[$wanted]"
    say "installing $what: minutes the first time (log: $log)"
    watch_pip
    "$venv_python" -m pip install --no-input --disable-pip-version-check --progress-bar off \
        --editable ".${wanted:+[$wanted]}" >>"$log" 2>&1 || explain_pip
    stop_watching
}

# Ends the run with the one line that says why pip failed.
explain_pip() {
    if grep -q 'No space left on device' "$log"; then
        die "the disk is full: make room for about 2 GB (8 GB with CUDA), then run again (log: $root/$log)"
    fi
    if grep -qE 'NewConnectionError|ConnectTimeout|ReadTimeout|Connection(Reset|Refused)?Error|Connection (broken|refused)|Max retries exceeded|name resolution|Name or service not known|Network is unreachable|ProxyError|SSLError' "$log" &&
        ! grep -q 'ResolutionImpossible' "$log"; then
        [ "$state" = build ] || rm -f "$unfinished" # pip fetches all before it changes anything
        die "the package index cannot be reached: check the network, the proxy and \`pip config list\`, then run again (log: $root/$log)"
    fi
    missing=$(sed -n 's/.*satisfies the requirement \([^ ]*\) .*(from versions: none).*/\1/p' "$log" | tail -n 1)
    if [ -n "$missing" ]; then # pip says no more than this where it was told not to retry, or an index is empty
        die "the package index has no $missing or cannot be reached: check the network and \`pip config list\`, then run again (log: $root/$log)"
    fi
    why=$(grep -E '^ *(ERROR|error|[A-Za-z]*Error): ' "$log" | tail -n 1 | sed 's/^ *//')
    die "pip failed: ${why:-$(tail -n 1 "$log")} (log: $root/$log)"
}

choose_cuda
extras=$(printf '%s\n' "$@" $cuda | sort -u | tr '\n' ' ' | sed 's/^ *//; s/ *$//')
sum=$(cksum <pyproject.toml)
look_at_venv
[ "$state" != done ] || exit 0

{ true >"$log"; } 2>/dev/null || die "cannot write in $root: check who owns it"
if [ "$state" = build ]; then
    build_venv
else # keep what earlier runs added
    extras=$(printf '%s\n' $extras $done_extras | sort -u | tr '\n' ' ' | sed 's/^ *//; s/ *$//')
    if [ -e "$stamp" ]; then true >"$unfinished"; rm "$stamp"; fi
fi
install_package
printf '%s\n' "$root" "$python_version" "$sum" "$extras" >"$stamp.new"
mv "$stamp.new" "$stamp"
rm -f "$unfinished"
say "ready"
