#!/usr/bin/env bash
# A certificate for a cluster, by which scheduler, workers and clients know one another, and Dask's settings that use it.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: cluster/certificates.sh FOLDER [DAYS]

Write into FOLDER, which must be new,

  key.pem    the key: whoever has it belongs to the cluster, and can run any code there
  cert.pem   the certificate of this key, good for DAYS days (default: 365); all sides accept it and no other
  dask.yaml  Dask's settings: TLS with these two, and nothing without

and then, in each terminal of scheduler, workers and clients, on every host with the folder at this same path,

  export DASK_CONFIG=FOLDER/dask.yaml
TEXT
}

refuse() {
    echo "certificates.sh: $1" >&2
    exit 2
}

[[ ${1-} != -h && ${1-} != --help ]] || { usage && exit 0; }
(($# == 1 || $# == 2)) || refuse "a folder must be named, and perhaps days; got $# arguments. Try --help."
folder=$1 days=${2:-365}
[[ $days =~ ^[1-9][0-9]{0,4}$ ]] || refuse "DAYS must be a positive number up to 99999; got $days. Try 365."
[[ ! -e $folder ]] || refuse "the folder must be new; got $folder. Give another, or remove it: its key ends with it."
command -v openssl >/dev/null || refuse "openssl must be on the PATH; got none. Install the package openssl."

umask 077 # for the owner alone, from the start
said=$(mkdir -p "$folder" 2>&1) || refuse "the folder must be one that can be made; got ${said#mkdir: }. Give another."
folder=$(cd "$folder" && pwd)
said=$(openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days "$days" -subj "/CN=daskgpt cluster" \
    -addext "keyUsage=critical,digitalSignature,keyCertSign" -addext "extendedKeyUsage=serverAuth,clientAuth" \
    -keyout "$folder/key.pem" -out "$folder/cert.pem" 2>&1) || {
    rm -rf "$folder"
    refuse "openssl must make a certificate; got: ${said##*$'\n'}. Try openssl 3."
}
quoted=${folder//\'/\'\'} # as YAML's texts have it
cat >"$folder/dask.yaml" <<TEXT
# Dask's settings for a cluster of which every side has this key. Read where DASK_CONFIG names this file.
distributed:
  comm:
    default-scheme: tls
    require-encryption: true
    tls:
      ca-file: '$quoted/cert.pem'
      scheduler: {cert: '$quoted/cert.pem', key: '$quoted/key.pem'}
      worker: {cert: '$quoted/cert.pem', key: '$quoted/key.pem'}
      client: {cert: '$quoted/cert.pem', key: '$quoted/key.pem'}
TEXT
printf 'export DASK_CONFIG=%q\n' "$folder/dask.yaml"
