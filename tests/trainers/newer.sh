#!/bin/sh
# An environment for trainers that take Python 3.12 or later (NeMo Gym, Harbor): FOLDER/python is its interpreter.
#
#   newer.sh FOLDER
#
# Where no such Python is at hand, it is Debian trixie's, in a root made with debootstrap; that takes root, as does
# running it. FOLDER and all above it have the same path inside.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
root=$folder/trixie

fail() {
    echo "$*" >&2
    exit 1
}

for python in ${NEWER_PYTHON:-} python3.13 python3.12; do
    "$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null && break
    python=
done

inside=
if [ -z "$python" ]; then
    python=/usr/bin/python3.13
    [ "$(id -u)" = 0 ] || fail "NeMo Gym takes Python 3.12 or later: install one, name one in NEWER_PYTHON, or run this as root, which makes a Debian trixie root."
    command -v debootstrap > /dev/null || { apt-get -q update && apt-get -q install -y debootstrap; }
    if [ ! -e "$root/.whole" ]; then
        rm -rf --one-file-system "$root"
        debootstrap --variant=minbase --include=python3.13,python3.13-venv,ca-certificates trixie "$root"
        touch "$root/.whole"
    fi
    # A mount namespace for each call: nothing stays mounted, whatever becomes of it.
    inside=$folder/inside
    cat > "$inside" << END
#!/bin/sh
export ROOT="$root" PROJECT="$project" GIT_PYTHON_REFRESH=quiet
exec unshare --mount sh -ec '
    for place in /proc /dev /tmp /etc/ssl "\$PROJECT"; do
        mkdir -p "\$ROOT\$place"
        mount --rbind "\$place" "\$ROOT\$place"
    done
    for file in /etc/resolv.conf /etc/hosts /etc/pip.conf; do
        [ ! -e "\$file" ] || cat "\$file" > "\$ROOT\$file"
    done
    exec chroot "\$ROOT" "\$@"
' sh "\$@"
END
    chmod +x "$inside"
    "$inside" true || fail "This machine does not let root make a mount namespace (unshare --mount): install Python 3.12 or later instead."
fi

printf '#!/bin/sh\nexec %s "%s/venv/bin/python" "$@"\n' "$inside" "$folder" > "$folder/python"
chmod +x "$folder/python"
${inside:+"$inside"} "$python" -m venv "$folder/venv"
"$folder/python" -m pip install -q --upgrade pip
"$folder/python" -m pip install -q -r "$here/requirements-newer.txt"
"$folder/python" -m pip install -q --no-deps -r "$here/requirements-newer-alone.txt"
"$folder/python" -m pip install -q --no-deps -e "$project"
