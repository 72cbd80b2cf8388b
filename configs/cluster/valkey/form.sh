#!/bin/sh
# Forms a cluster from the nodes in NODES (host:port or host:port@bus-port ...), and repairs it after nodes came back
# empty. PRIMARIES of the nodes are primaries with equal parts of the slots, the others their replicas. Does not change
# what is already right.
# Exit status 0: the cluster is complete. 1: not yet; run the script again. Valkey's own failover does not depend on it.
# CLI: valkey-cli or redis-cli with options. REDISCLI_AUTH: the password.
set -u
CLI=${CLI:-valkey-cli --user keeper --no-auth-warning}
PRIMARIES=${PRIMARIES:-3}
SLOTS=16384

ask() { # NODE COMMAND...: print the node's answer, without carriage returns
  node=${1%@*}; shift
  timeout 5 $CLI -h "${node%:*}" -p "${node##*:}" "$@" 2>&1 | tr -d '\r'
}

address_of() { # NODE: print its IP address, which CLUSTER MEET needs
  getent hosts "${1%%:*}" | awk 'NR == 1 {print $1}'
}

nodes_of() { # NODE: print a line for each node that it knows, without those in handshake
  ask "$1" CLUSTER NODES | grep -v handshake
}

slots_of() { # NODE: print each range of slots that it owns itself, as first-last
  nodes_of "$1" | awk '$3 ~ /myself,master/ {for (i = 9; i <= NF; i++) if ($i !~ /^\[/) print $i}'
}

later() { echo "not yet: $*"; exit 1; }

ids=""
for node in $NODES; do
  id=$(ask "$node" CLUSTER MYID)
  echo "$id" | grep -Eq '^[0-9a-f]{40}$' || later "$node: $id"
  ids="$ids $id"
done
set -- $NODES
first=$1

# Introduce nodes that have lost their state or have a new address.
for node in $NODES; do
  met=0
  for id in $ids; do nodes_of "$node" | grep -q "^$id [^ ]* [^ ]* .* connected" && met=$((met + 1)); done
  [ "$met" -ge $# ] && continue
  port=${node%@*}; port=${port##*:}
  case $node in *@*) bus=${node#*@} ;; *) bus=$((port + 10000)) ;; esac
  for other in $NODES; do
    [ "$other" = "$node" ] || ask "$other" CLUSTER MEET "$(address_of "$node")" "$port" "$bus" > /dev/null
  done
  strangers=1
done
[ -z "${strangers:-}" ] || later "nodes have been introduced to each other"

# A node that is not in NODES is gone for good. Its replica takes over if it was a primary; then all nodes forget it.
is_one_of_us() { case " $ids " in *" $1 "*) return 0 ;; *) return 1 ;; esac }
for node in $NODES; do
  of=$(nodes_of "$node" | awk '$3 ~ /myself,slave/ {print $4}')
  if [ -n "$of" ] && [ "$of" != "-" ] && ! is_one_of_us "$of"; then
    ask "$node" CLUSTER FAILOVER TAKEOVER > /dev/null
    took=1
  fi
done
[ -z "${took:-}" ] || later "replicas have taken over"
for node in $NODES; do
  for known in $(nodes_of "$node" | awk '{print $1}'); do
    if ! is_one_of_us "$known"; then ask "$node" CLUSTER FORGET "$known" > /dev/null; forgot=1; fi
  done
done
[ -z "${forgot:-}" ] || later "nodes that are gone were forgotten"

# Give slots that no node owns to primaries without slots, one whole part to each.
owned=$(for node in $NODES; do slots_of "$node"; done)
part=0
while [ "$part" -lt "$PRIMARIES" ]; do
  from=$((SLOTS * part / PRIMARIES))
  to=$((SLOTS * (part + 1) / PRIMARIES - 1))
  if ! echo "$owned" | awk -F- -v s="$from" '$1 <= s && s <= ($2 == "" ? $1 : $2) && NF {f = 1} END {exit !f}'; then
    for node in $NODES; do
      nodes_of "$node" | grep -q 'myself,master' || continue
      [ -z "$(slots_of "$node")" ] || continue
      ask "$node" CLUSTER ADDSLOTSRANGE "$from" "$to" > /dev/null
      gave=1
      break
    done
  fi
  part=$((part + 1))
done
[ -z "${gave:-}" ] || later "slots were given to primaries"

# Make a primary without slots a replica of the primary with the fewest replicas. If there is none, move a replica from
# a primary that has at least two more. Ask each node about itself, because other nodes learn of its role later.
state=$(for node in $NODES; do
  nodes_of "$node" | awk -v node="$node" '$3 ~ /myself/ {print node, $1, ($3 ~ /slave/ ? $4 : (NF > 8 ? "primary" : "empty"))}'
done)
primary=$(echo "$state" | awk '$3 == "primary" {n[$2] += 0} $3 ~ /^[0-9a-f]+$/ {n[$3]++}
  END {for (id in n) print n[id], id}' | sort -n)
fewest=$(echo "$primary" | head -n 1)
most=$(echo "$primary" | tail -n 1)
mover=$(echo "$state" | awk '$3 == "empty" {print $1; exit}')
if [ -z "$mover" ] && [ $((${most%% *} - ${fewest%% *})) -ge 2 ]; then
  mover=$(echo "$state" | awk -v of="${most#* }" '$3 == of {print $1; exit}')
fi
if [ -n "$mover" ]; then
  ask "$mover" CLUSTER REPLICATE "${fewest#* }" > /dev/null
  later "a replica was given to a primary" # one at a time, so that the next count includes this one
fi

for node in $NODES; do
  ask "$node" CLUSTER INFO | grep -q '^cluster_state:ok' || later "$node is not ready"
  ask "$node" CLUSTER INFO | grep -q "^cluster_slots_ok:$SLOTS" || later "$node misses slots"
  ! ask "$node" INFO replication | grep -q '^master_link_status:down' || later "$node has not copied its primary yet"
done
echo "whole: $# nodes, $PRIMARIES primaries"
