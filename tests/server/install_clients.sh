#!/usr/bin/env bash
# Installs the native binaries of the coding agents that tests/server/test_coding_clients.py drives, into the git-ignored
# folder .clients/bin. On request only (several hundred MB each); without them those tests say why they are skipped.
#
#   tests/server/install_clients.sh [claude] [codex] [opencode]      default: all three, at the qualified versions
#   CLAUDE_VERSION=2.1.332 tests/server/install_clients.sh claude    another version, beside the qualified one
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
home="$root/.clients"
mkdir -p "$home/bin"

# NAME VERSION PACKAGE PATH-IN-PACKAGE
install() {
  local name=$1 version=$2 package=$3 path=$4
  local folder="$home/$name-$version"
  if [ ! -x "$folder/node_modules/$name/$path" ]; then
    mkdir -p "$folder"
    npm install --prefix "$folder" --ignore-scripts --no-audit --no-fund --no-save --silent --force \
      "$name@npm:$package"
    chmod +x "$folder/node_modules/$name/$path"
  fi
  ln -sfn "$folder/node_modules/$name/$path" "$home/bin/$name"
  echo "$name $version: $home/bin/$name"
}

[ $# -gt 0 ] || set -- claude codex opencode
for client in "$@"; do
  case "$client" in
    claude)
      version=${CLAUDE_VERSION:-2.1.296}
      install claude "$version" "@anthropic-ai/claude-code-linux-x64@$version" claude ;;
    codex)
      version=${CODEX_VERSION:-0.162.1}
      install codex "$version" "@openai/codex@$version-linux-x64" vendor/x86_64-unknown-linux-musl/bin/codex ;;
    opencode)
      version=${OPENCODE_VERSION:-1.18.33}
      install opencode "$version" "opencode-linux-x64@$version" bin/opencode ;;
    *) echo "unknown client: $client (claude, codex, opencode)" >&2; exit 2 ;;
  esac
done
