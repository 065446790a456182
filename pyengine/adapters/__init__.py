"""Other libraries' words for windows, one module a library; each needs its library: `pip install 'pyengine[adapters]'`."""
