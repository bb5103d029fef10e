#!/usr/bin/env bash
# Prometheus, its promtool, Alertmanager and nginx for tests: found, or taken from the system's packages.
set -euo pipefail

programs=(prometheus promtool prometheus-alertmanager nginx)
templates=/usr/share/prometheus/alertmanager # Debian's Alertmanager reads its templates there
if [ "$(command -v "${programs[@]}" | wc -l)" -eq 4 ] && [ -d "$templates" ]; then exit 0; fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo -n); fi

can_install() {
  command -v apt-get > /dev/null || return 1
  [ "$(id -u)" -eq 0 ] || sudo -n true 2> /dev/null
}

# The packages are unpacked, not installed: they would start servers.
if can_install; then
  echo "Installing Prometheus, Alertmanager and nginx for tests (once, 30 MB)"
  folder=$(mktemp -d)
  if "${as_root[@]}" apt-get -qq update > /dev/null 2>&1 \
    && (cd "$folder" && apt-get -qq download prometheus prometheus-alertmanager nginx > /dev/null 2>&1 \
      && for package in ./*.deb; do dpkg-deb -x "$package" .; done) \
    && "${as_root[@]}" install "$folder"/usr/bin/prom* "$folder/usr/sbin/nginx" /usr/local/bin \
    && "${as_root[@]}" install -D -m 644 -t "$templates" "$folder$templates"/*.tmpl; then
    rm -rf "$folder"
    exit 0
  fi
  rm -rf "$folder"
fi

echo "Tests with Prometheus, Alertmanager and nginx need them, and they could not be installed: install the packages 'prometheus', 'prometheus-alertmanager' and 'nginx' and run again." >&2
if [ "${CI:-}" = "true" ]; then exit 1; fi
exit 0
