# What the command lines of a document need: an imageserver, a dominator and a filegen-server on
# their usual ports, and the machine web1. Each has a certificate; the operator has all powers.
set -eu
if [ $$ != 1 ]; then
    # It removes directories of the real machine otherwise.
    echo "only the tests run this, in a file-system of its own" >&2
    exit 1
fi
failed=0

# Runs a command of the document, which must exit with CODE. After CODE, `t` stands for commands
# that do not end: SIGTERM ends them when they have begun.
run() {
    local code
    if [[ $1 == *t ]]; then
        true > said
        bash -c "exec $2" < /dev/null >> said 2>&1 &
        until_ok grep -E 'listening on | status ' said || wrong "does not begin: $2"
        kill $!
        wait $! && code=0 || code=$?
    else
        timeout --preserve-status --kill-after=10 60 bash -o pipefail -c "$2" < /dev/null > said 2>&1 &&
            code=0 || code=$?
    fi
    [ $code = "${1%t}" ] || wrong "exited with $code, not ${1%t}: $2"
}

# The last command must have printed this text.
prints() {
    grep -qF -- "$1" said || wrong "did not print: $1"
}

wrong() {
    echo "$1"
    sed 's/^/    /' said
    failed=1
}

# Prepares what commands need. Each part of it must succeed.
prepare() {
    set +e
    (set -e; eval "$1") < /dev/null > prepared 2>&1
    local code=$?
    set -e
    if [ $code != 0 ]; then
        printf 'failed to prepare: %s\n' "$1"
        tail -n 8 prepared
        for name in $(ls /etc/daemons); do tail -n 8 -v "/var/log/$name.log"; done
        exit 1
    fi
}

# Waits until a command succeeds.
until_ok() {
    local end=$((SECONDS + 60))
    until "$@" > tried 2>&1; do
        if [ $SECONDS -ge $end ]; then
            cat tried
            return 1
        fi
        sleep 0.1
    done
}

# Makes the certificate of the daemon NAME, of this kind and for these hosts.
certificate() {
    local name=$1 set=$2 hosts=() host
    shift 2
    for host; do hosts+=(--host "$host"); done
    domtool cert issue --ca /etc/site-ca --out "/etc/certs/$name" --name "$name" --set "$set" "${hosts[@]}"
}

# Starts the daemon NAME with this command line; `systemctl` knows it then.
daemon() {
    local name=$1
    shift
    printf '%q ' "$@" > "/etc/daemons/$name"
    systemctl start "$name"
}

start_imageserver() {
    certificate images imageserver images images1 server1 localhost
    daemon imageserver imageserver --tls /etc/certs/images --listen 127.0.0.1:6971 --data /var/lib/imageserver "$@"
    until_ok imagetool list
}

start_dominator() {
    certificate dom1 dominator dom1 localhost
    [ -e /etc/fleet.json ] || echo '[{"Hostname": "web1"}]' > /etc/fleet.json
    daemon dominator dominator --tls /etc/certs/dom1 --imageserver images --mdb /etc/fleet.json \
        --state /var/lib/dominator "$@"
    until_ok domtool status
}

# Starts the subd of HOST, which has an address in /etc/hosts.
start_subd() {
    local host=$1 address
    shift
    address=$(getent hosts "$host" | cut -d ' ' -f 1)
    certificate "$host" subd "$host" localhost
    mkdir -p "/srv/$host/etc"
    [ -e "/srv/$host/etc/machine-id" ] || new_machine_id "$host"
    daemon "subd-$host" subd --tls "/etc/certs/$host" --listen "$address:6969" --root "/srv/$host" \
        --hostname "$host" --service-command "record-service /var/log/$host.services" \
        --health-command env --supervisor direct --device-speed 1000000000 "$@"
    until_ok subtool --subd "$host" poll
}

new_machine_id() {
    tr -d - < /proc/sys/kernel/random/uuid > "/srv/$1/etc/machine-id"
}

# Waits until machines are synced with images: each image follows the name of its machine.
has() {
    local synced='.[] | select(.hostname == $host and .status == "synced" and .last_image == $image)'
    while [ $# -gt 0 ]; do
        until_ok answers "$synced" --arg host "$1" --arg image "$2"
        shift 2
    done
}

# Succeeds if jq finds something in the list of machines.
answers() {
    domtool list-subs --format json | jq --exit-status "$@"
}

# Makes the directory DIRECTORY with files of these paths, each with what it is called and its
# directory; prints DIRECTORY.
tree() {
    local directory=$1
    shift
    for path; do
        mkdir -p "$directory${path%/*}"
        echo "$directory" > "$directory$path"
    done
    echo "$directory"
}

# Adds images of 200 files, of which two differ from image to image.
images() {
    for name; do
        local root=trees/$name
        tree "$root" /etc/motd /usr/bin/tool
        mkdir -p "$root/usr/share"
        (cd "$root/usr/share"; touch -d '2026-01-01' {1..198})
        imagetool add --required-paths '' "$name" "$root" - -
    done
}

# Replaces the machine database: each machine requires the image that follows its name.
fleet() {
    printf '{"Hostname": "%s", "RequiredImage": "%s"}\n' "$@" | jq -s . > /etc/fleet.new
    mv /etc/fleet.new /etc/fleet.json
}

start_replica() {
    certificate "$1" imageserver "$1" localhost
    daemon "$1" imageserver --tls "/etc/certs/$1" --listen "$2:6971" --data "/var/lib/$1" \
        --replicate-from images1
    until_ok imagetool --imageserver "$1" list
}

# Makes /etc/motd and /etc/resolv.conf for each machine, and a certificate if there is an authority.
start_filegen_server() {
    certificate files filegen-server files.example.com localhost
    mkdir -p /etc/filegen-server
    cat > /etc/filegen-server/config.toml <<'END'
[[generator]]
path = "/etc/motd"
kind = "file"
file = "motd"
[[generator]]
path = "/etc/resolv.conf"
kind = "template"
file = "resolv.conf.j2"
variables = "servers.toml"
END
    [ ! -e /var/lib/filegen-server/ca ] || cat >> /etc/filegen-server/config.toml <<'END'
[[generator]]
path = "/etc/web/cert.pem"
kind = "certificate"
key = "server"
key_path = "/etc/web/key.pem"
authority = "/var/lib/filegen-server/ca"
END
    echo hello > /etc/filegen-server/motd
    echo 'nameserver {{ Variables.nyc | first }}' > /etc/filegen-server/resolv.conf.j2
    echo 'nyc = ["192.0.2.1"]' > /etc/filegen-server/servers.toml
    daemon filegen-server filegen-server --tls /etc/certs/files "$@"
    until_ok filegen-client list
}

# Makes a directory that looks like a small Debian.
debian() {
    tree "$1" /etc/motd /etc/ssh/sshd_config /usr/bin/chfn /usr/share/man/man1/ls.1 /etc/resolv.conf
    echo 12.15 > "$1/etc/debian_version"
    echo 'root:x:0:0:root:/root:/bin/sh' > "$1/etc/passwd"
    mkdir -p "$1/var/lib/dpkg"
    for name in adduser apt base-files libssl3 zlib1g; do
        printf 'Package: %s\nStatus: install ok installed\nArchitecture: amd64\nVersion: 3.0.20-1\n\n' $name
    done > "$1/var/lib/dpkg/status"
}

# Puts another machine in the place of HOST, which the dominator does not trust.
other_machine() {
    systemctl stop "subd-$1"
    new_machine_id "$1"
    systemctl start "subd-$1"
    until_ok answers '.[] | select(.hostname == $host and .status == "wrong-machine")' --arg host "$1"
}

# Prints the environment NAME, which brings a bundle, with more keys.
environment() {
    jq -n '{$name, select: {hosts: ["*"]}, source: {bundle: "bundles/\($bundle)"}} + $more' \
        --arg name "$1" --arg bundle "$2" --argjson more "$(jq -n "$3")"
}

# Waits until a rollout has succeeded.
ended() {
    until_ok sh -c "domtool rollout show $1 | grep '^$1: succeeded'"
}

# Gives the tree ROOT the task NAME with these words, and writes its trigger to NAME.trigger.
task() {
    local root=$1 name=$2 path=/etc/dominator/tasks.d/$2.json
    shift 2
    jq -n --arg name "$name" '{$name, argv: $ARGS.positional}' --args "$@" > "$root$path"
    jq -n --arg name "$name" --arg path "$path" \
        '{MatchLines: [$path], Service: $name, Kind: "task"}' > "$name.trigger"
}

for program in subd subtool fs2objectcache imageserver imagetool dominator domtool \
    filegen-server filegen-client record-service; do
    ln -sf localfleet /usr/local/bin/$program
done
cat > /etc/hosts <<'END'
127.0.0.1 localhost web1 images images1 server1 dom1 files.example.com
127.0.0.2 images2
127.0.0.9 web9
127.0.0.11 sub-1
127.0.0.12 sub-2
END
# Stands in for that of systemd: the daemons are those of /etc/daemons.
cat > /usr/local/bin/systemctl <<'END'
#!/bin/bash -e
case $1 in
start) setsid bash -c "exec $(cat "/etc/daemons/$2")" < /dev/null >> "/var/log/$2.log" 2>&1 &
    echo $! > "/run/$2.pid" ;;
stop) pid=$(cat "/run/$2.pid")
    kill "$pid"
    while kill -0 "$pid"; do sleep 0.05; done 2> /dev/null ;;
*) exit 1 ;;
esac
END
chmod 755 /usr/local/bin/systemctl
# Nothing of a real host is here.
rm -rf /root/ca /backup /srv /etc/{dominator,imageserver,filegen-server,subd,daemons,certs,site-ca} \
    /etc/fleet.json /var/lib/{[dD]ominator,imageserver,filegen-server,subd} /home/ann
sed -i '/^\(dominator\|imageserver\|filegen-server\):/d' /etc/{passwd,group,shadow,gshadow}
mkdir -p /etc/daemons /home/ann/site /srv /run /tmp /var/{log,lib,tmp}
cd /home/ann/site
domtool cert ca /etc/site-ca 2> /dev/null
domtool cert issue --ca /etc/site-ca --out ~/.config/dominator/tls --name ann --method '*.*' 2> /dev/null
