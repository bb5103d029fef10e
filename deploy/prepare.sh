#!/usr/bin/env bash
# Creates the secrets of docker-compose.yml: a CA and the server's certificate, random passwords
# (.env), and a folder for tokens. Existing files stay, but a certificate that expires within a
# month is renewed, with its names: run it each week.
#
#   deploy/prepare.sh [HOST...]     names or addresses that agents use for this machine
set -euo pipefail
umask 077
cd "$(dirname "$0")/.."

secrets=deploy/secrets
mkdir -p "$secrets/ca" "$secrets/tls" "$secrets/tokens"

names=(localhost collector collector-1 collector-2 proxy cluster-proxy dashboard cluster-dashboard "$@")
alternatives="IP:127.0.0.1,IP:::1"
for name in "${names[@]}"; do
    if [[ "$name" =~ ^[0-9.]+$ || "$name" == *:* ]]; then
        alternatives+=",IP:$name"
    else
        alternatives+=",DNS:$name"
    fi
done

certificate=$secrets/tls/server.crt
if [[ -e "$certificate" ]]; then
    alternatives=$(openssl x509 -in "$certificate" -noout -ext subjectAltName | tail -n 1 | sed 's/IP Address:/IP:/g; s/ //g')
fi

if [[ ! -e "$secrets/ca/ca.key" ]]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 \
        -subj "/CN=rankscope deployment CA" -addext "basicConstraints=critical,CA:TRUE" \
        -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -keyout "$secrets/ca/ca.key" -out "$secrets/tls/ca.crt" 2> /dev/null
fi
if [[ ! -e "$certificate" ]] || ! openssl x509 -in "$certificate" -noout -checkend 2592000 > /dev/null; then
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=rankscope" \
        -keyout "$secrets/tls/new.key" -out "$secrets/tls/new.csr" 2> /dev/null
    openssl x509 -req -in "$secrets/tls/new.csr" -days 365 \
        -set_serial "0x$(openssl rand -hex 16)" \
        -CA "$secrets/tls/ca.crt" -CAkey "$secrets/ca/ca.key" -out "$secrets/tls/new.crt" \
        -extfile <(printf '%s\n' basicConstraints=CA:FALSE keyUsage=critical,digitalSignature \
            extendedKeyUsage=serverAuth subjectKeyIdentifier=hash authorityKeyIdentifier=keyid \
            "subjectAltName=$alternatives") 2> /dev/null
    rm "$secrets/tls/new.csr"
    mv "$secrets/tls/new.key" "$secrets/tls/server.key"
    mv "$secrets/tls/new.crt" "$certificate"
fi

if [[ ! -e .env ]]; then
    {
        for name in CLICKHOUSE_PASSWORD RANKSCOPE_READER_PASSWORD RANKSCOPE_CLUSTER_SECRET GRAFANA_PASSWORD; do
            # Hexadecimal, so that it needs no escaping in a URL.
            printf '%s=%s\n' "$name" "$(openssl rand -hex 24)"
        done
        printf 'RANKSCOPE_UID=%s\nRANKSCOPE_GID=%s\n' "$(id -u)" "$(id -g)"
        printf 'RANKSCOPE_SERVER_NAME=%s\n' "${1:-localhost}"
    } > .env
fi
echo "ready: .env and $secrets; agents need $secrets/tls/ca.crt, and only this script needs $secrets/ca"
