#!/usr/bin/env bash
# promtool for the test of the Prometheus rules: found, or installed from the system's packages.
set -euo pipefail

if command -v promtool > /dev/null; then exit 0; fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo -n); fi

can_install() {
  command -v apt-get > /dev/null || return 1
  [ "$(id -u)" -eq 0 ] || sudo -n true 2> /dev/null
}

# The package is unpacked, not installed: it would start a Prometheus server.
if can_install; then
  echo "Installing promtool for the test of the Prometheus rules (once)"
  folder=$(mktemp -d)
  if "${as_root[@]}" apt-get -qq update > /dev/null 2>&1 \
    && (cd "$folder" && apt-get -qq download prometheus > /dev/null 2>&1 && dpkg-deb -x prometheus_*.deb .) \
    && "${as_root[@]}" install "$folder/usr/bin/promtool" /usr/local/bin/promtool; then
    rm -rf "$folder"
    exit 0
  fi
  rm -rf "$folder"
fi

echo "The test of the Prometheus rules needs promtool and it could not be installed: install the package 'prometheus' and run again." >&2
if [ "${CI:-}" = "true" ]; then exit 1; fi
exit 0
