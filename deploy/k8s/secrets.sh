#!/bin/sh
# Makes the Secrets of a namespace that are not there yet: API keys, and one Redis password per role.
# Usage: sh deploy/k8s/secrets.sh [NAMESPACE]     (needs kubectl and openssl)
# Prints the API key of the tenant `default` once; only its hash is kept. Passwords are never
# printed. Run again, it changes nothing; a Secret that was deleted is made anew.
set -eu
namespace=${1:-quire}
here=$(cd "$(dirname "$0")" && pwd)

exists() { kubectl --namespace "$namespace" get secret "$1" >/dev/null 2>&1; }
create() { kubectl --namespace "$namespace" create secret generic "$@"; }
sha256() { printf %s "$1" | openssl dgst -sha256 -r | cut -d' ' -f1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 077

if exists redis-urls && exists redis-acl; then
    echo "redis-urls and redis-acl are there"
elif exists redis-urls || exists redis-acl; then
    echo "only one of redis-urls and redis-acl is there; delete it and run this again" >&2
    exit 1
else
    cp "$here/base/redis/users.acl" "$work/users.acl"
    for role in gateway scheduler worker; do
        password=$(openssl rand -hex 24)
        printf 'redis://%s:%s@redis:6379/0' "$role" "$password" > "$work/$role"
        sed "s/@$role@/$(sha256 "$password")/" "$work/users.acl" > "$work/next"
        mv "$work/next" "$work/users.acl"
    done
    create redis-urls --from-file="$work/gateway" --from-file="$work/scheduler" \
        --from-file="$work/worker"
    create redis-acl --from-file="$work/users.acl"
fi

if exists quire-api-keys; then
    echo "quire-api-keys is there"
else
    key=$(openssl rand -hex 32)
    printf 'default:%s\n' "$(sha256 "$key")" > "$work/keys"
    create quire-api-keys --from-file="$work/keys"
    echo "API key of the tenant default, shown this once: $key"
fi
