#!/usr/bin/env bash
# `make browser`: a Chromium for the dashboard's test. The one that is here, else Debian's, which root installs, else
# Playwright's own build, which lies in the user's cache. Says why where there is none: the test then skips.
set -uo pipefail
if command -v chromium chromium-headless-shell chromium-browser google-chrome; then exit 0; fi
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
libraries=()
if [[ $EUID == 0 ]] && command -v apt-get >/dev/null; then
    echo "== installing Chromium =="
    (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell) >"$log" 2>&1 && exit 0
    echo "browser: apt-get cannot install chromium-headless-shell: $(tail -n 1 "$log")"
    libraries=(--with-deps)
fi
"${PYTHON:-python3}" -m playwright install "${libraries[@]}" chromium-headless-shell >"$log" 2>&1 && exit 0
echo "browser: SKIPPED: Playwright cannot install its Chromium: $(grep -m 1 Error "$log" || tail -n 1 "$log")"
