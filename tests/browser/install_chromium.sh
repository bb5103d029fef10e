#!/usr/bin/env bash
# A headless Chromium for the browser tests: found, or installed from the system's packages.
set -euo pipefail

for name in chromium chromium-browser google-chrome google-chrome-stable; do
  if command -v "$name" > /dev/null; then exit 0; fi
done

as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo -n); fi

can_install() {
  command -v apt-get > /dev/null || return 1
  [ "$(id -u)" -eq 0 ] || sudo -n true 2> /dev/null
}

if can_install; then
  echo "Installing chromium for the browser tests (once)"
  export DEBIAN_FRONTEND=noninteractive
  if "${as_root[@]}" apt-get -qq update > /dev/null 2>&1 \
    && "${as_root[@]}" apt-get -qq install -y --no-install-recommends chromium > /dev/null 2>&1 \
    && command -v chromium > /dev/null; then
    exit 0
  fi
fi

echo "The browser tests need Chromium and none could be installed: install the package 'chromium' (or 'chromium-browser') and run again." >&2
if [ "${CI:-}" = "true" ]; then exit 1; fi
exit 0
