#!/bin/sh
# Lowers every kernel for GPUs with the oldest JAX that pyproject.toml admits; the tests in .venv do so with the newest.
#
#   sh scripts/test_oldest.sh      after `sh scripts/setup.sh dev`, whose .venv it takes Python and pip from
#
# Installs what those tests need, and no more, into .venv-oldest: once, and again when the versions or Python change.
# A failed installation says why in one line, exits with 1 and leaves no stamp. pip's own words: .setup-oldest.log.
set -eu

unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX VIRTUAL_ENV
export PIP_USER=0
CDPATH='' cd -- "$(dirname -- "$0")/.."
root=$(pwd -P)

log=.setup-oldest.log
stamp=.venv-oldest/setup-stamp # what the environment was made for

die() {
    printf 'oldest JAX: %s\n' "$*" >&2
    exit 1
}

oldest=$(sed -n 's/^  "jax>=\([0-9.]*\),.*/\1/p' pyproject.toml)
[ -n "$oldest" ] || die "pyproject.toml has no line like \"jax>=0.0.0,<1\" among its dependencies"
others=$(sed -nE 's/^  "((jaxtyping|ml_dtypes|numpy|pytest)>=[0-9.]+)".*/\1/p' pyproject.toml | tr '\n' ' ')
wanted="jax==$oldest jaxlib==$oldest ${others% }"
python_version=$(.venv/bin/python -E -c 'import sys; print(sys.version.split()[0])') ||
    die "there is no .venv that works: run \`make setup\` first"

made_for="$root $python_version $wanted"
if [ "$(cat "$stamp" 2>/dev/null)" != "$made_for" ]; then
    printf 'oldest JAX: installing jax %s into .venv-oldest (log: %s)\n' "$oldest" "$log"
    rm -rf .venv-oldest
    # Without its own pip: that of .venv does the work.
    .venv/bin/python -m venv --without-pip .venv-oldest >"$log" 2>&1 || die "Python could not make .venv-oldest: $(tail -n 1 "$log")"
    # shellcheck disable=SC2086 # one word a requirement
    .venv/bin/python -m pip --python .venv-oldest/bin/python install --no-input --disable-pip-version-check \
        --progress-bar off $wanted >>"$log" 2>&1 ||
        die "pip failed: $(grep -E '^ *(ERROR|error): ' "$log" | tail -n 1) (log: $root/$log; \`make test ARGS=tests\` runs the other tests)"
    printf '%s\n' "$made_for" >"$stamp"
fi

printf 'oldest JAX: lowering every kernel with jax %s\n' "$oldest"
JAX_PLATFORMS=cpu exec .venv-oldest/bin/python -m pytest -p no:cacheprovider -k lower tests/pallas_kernels
