"""The patch queue: small changes to one pinned SGLang release, and the commands that keep them.

The pinned release is unpacked to `build/sglang/`, a git repository whose tag `upstream` is the
release and whose branch `dflash` has one commit for each patch of `series`. To change a patch,
commit there (or `--fixup` and `rebase --autosquash`) and run `make refresh`.

pin.py       what pin.toml says
git.py       git, independent of the user's configuration
patch.py     a patch file: header, diff, name
upstream.py  download and unpack the release
checkout.py  build/sglang: apply, unapply, refresh
check.py     what every patch must fulfil; the trial on another release
pack.py      the patched tree as a wheel
"""
