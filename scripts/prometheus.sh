#!/bin/bash
# Debian's Prometheus and promtool, unpacked below .prometheus: not installed, so that no service of the system starts.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .prometheus
cd .prometheus
trap 'rm -rf etc lib var usr/share' EXIT # with links to what is not installed, at which `ray up` would end
[ -x usr/bin/promtool ] && exit 0
timeout 60 apt-get download -qq prometheus 2>/dev/null ||
    { timeout 60 apt-get update -qq && timeout 60 apt-get download -qq prometheus; }
dpkg -x prometheus_*.deb .
rm prometheus_*.deb
usr/bin/promtool --version | head -1
