#!/bin/sh
# An example of readmission.repair (docs/operate/configuration.md): repair-node.sh NODE NEED. Exit code 0 says: check the node now.
set -eu
node=$1 need=$2
case $need in
reboot)
    # The node's own BMC; it goes on when the machine answers again.
    ipmitool -H "bmc-$node" -U admin -f /etc/unicron/bmc.password chassis power cycle
    sleep 60
    until ping -c 1 -W 2 "$UNICRON_ADDRESS" >/dev/null; do sleep 5; done
    ;;
*)
    echo "node $node needs $need: a person has to come" >&2
    exit 1
    ;;
esac
