# Run by mmdebstrap outside the new root $1, with apt's lists of that root. It
# fetches, and does not install, the kernel package that the metapackage names.
set -eu
mkdir "$1/hib-kernel"
cd "$1/hib-kernel"
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
package=$(apt-cache depends --important linux-image-cloud-amd64 |
	sed -n 's/^ *Depends: \(linux-image-[^ ]*\)$/\1/p' | head -n 1)
if [ -z "$package" ]; then
	echo 'E: the mirror offers no kernel package linux-image-cloud-amd64' >&2
	exit 1
fi
apt-get -q download "$package"
mv ./*.deb kernel.deb
