# Run by mmdebstrap when all packages are in; $1 is the new root. It makes the
# root file system of a sandbox out of a plain Debian.
set -eu
root=$1

# The user that processes run as unless they say otherwise.
chroot "$root" useradd --uid 1000 --user-group --create-home --shell /bin/bash user
printf 'user ALL=(ALL:ALL) NOPASSWD: ALL\n' > "$root/etc/sudoers.d/user"
chmod 0440 "$root/etc/sudoers.d/user"

# What a guest gets from its agent when it starts or resumes.
mkdir -p "$root/etc/hib"
: > "$root/etc/machine-id"
printf 'hib\n' > "$root/etc/hostname"
printf '127.0.0.1 localhost hib\n::1 localhost ip6-localhost ip6-loopback\n' > "$root/etc/hosts"
printf '# Written by the guest agent.\n' > "$root/etc/resolv.conf"
chmod 0644 "$root/etc/machine-id" "$root/etc/hostname" "$root/etc/hosts" "$root/etc/resolv.conf"

# apt works in the sandbox with the sources that the root came from, without
# what only the build may know: passwords in addresses, the host's proxies.
sed -i -E 's#(://)[^/@[:space:]]*@#\1#' "$root/etc/apt/sources.list"
rm -f "$root/etc/apt/apt.conf.d/90hib-build"
# Files of the sandbox are in its memory: keep indexes compressed and no
# packages that were installed.
cat > "$root/etc/apt/apt.conf.d/90hib" <<'EOF'
Acquire::Languages "none";
Acquire::GzipIndexes "true";
Acquire::CompressionTypes::Order:: "gz";
APT::Keep-Downloaded-Packages "false";
EOF
# Services are not started by their packages: there is no init system.
printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
chmod 0755 "$root/usr/sbin/policy-rc.d"

# Manual pages are left out, but some packages want their folders.
for section in 1 2 3 4 5 6 7 8; do mkdir -p "$root/usr/share/man/man$section"; done
rm -rf "$root"/var/cache/debconf/*-old "$root"/var/lib/dpkg/*-old "$root"/var/log/*.log "$root"/var/log/apt
