#!/bin/sh
# Generates the Go of one service: run by go generate in api/NAME.
# Needs protoc and its standard includes (Debian: protobuf-compiler libprotobuf-dev);
# the plug-ins are tools of the module.
set -eu
name=$1
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
cd "$(dirname "$0")"
GOBIN=$tools go install google.golang.org/protobuf/cmd/protoc-gen-go connectrpc.com/connect/cmd/protoc-gen-connect-go
PATH="$tools:$PATH" protoc -I "$name" --go_out="$name" --go_opt=paths=source_relative \
	--connect-go_out="$name" --connect-go_opt=paths=source_relative "$name.proto"
