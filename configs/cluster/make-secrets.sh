#!/bin/sh
# make-secrets.sh FOLDER: creates all secrets of the cluster as files in a new folder, then prints the commands that
# create them in Kubernetes. Nothing is sent anywhere. Keep the folder private, or delete it afterwards.
set -eu
folder=${1:?"usage: make-secrets.sh FOLDER"}
umask 077
mkdir "$folder"
cd "$folder"
word() { openssl rand -hex 32; }
digest() { printf %s "$1" | sha256sum | cut -d' ' -f1; }

store=$(word); keeper=$(word); replication=$(word); client=$(word); metrics=$(word)
mkdir keys metrics store valkey vllm
printf '[keys]\n"sha256:%s" = "team-a"\n"sha256:%s" = "prometheus"\n' "$(digest "$client")" "$(digest "$metrics")" > keys/keys.toml
printf '%s\n' "$client" > client.key # the API key for a client of team-a; not part of any secret
operator=$(word)
printf '[keys]\n"sha256:%s" = "operator"\n' "$(digest "$operator")" > keys/operators.toml
printf '%s\n' "$operator" > operator.token
printf '%s\n' "$metrics" > metrics/prometheus.key
word > metrics/sidecar.token
printf '%s\n' "$store" > store/password
word > store/encryption.key
printf '%s' "$keeper" > valkey/keeper-password
cat > valkey/users.acl <<ACL
user default off
user kvtier on #$(digest "$store") ~kvtier:* resetchannels -@all +get +getrange +set +exists +unlink +scan +hello +ping +cluster|slots +asking
user keeper on #$(digest "$keeper") resetchannels -@all +ping +cluster +info
user replica on #$(digest "$replication") resetchannels -@all +psync +replconf +ping
ACL
printf 'masteruser replica\nmasterauth %s\n' "$replication" > valkey/replication.conf
printf '%s' "$client" > vllm/api-key # vLLM has one key for all clients

for name in keys metrics store vllm; do
  set -- ; for file in "$name"/*; do set -- "$@" "--from-file=$folder/$file"; done
  echo kubectl -n kvtier create secret generic "$name" "$@"
done
echo kubectl -n kvtier create secret generic valkey "--from-file=$folder/valkey/users.acl" \
  "--from-file=$folder/valkey/replication.conf" "--from-file=$folder/valkey/keeper-password"
