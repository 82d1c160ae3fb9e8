//! Tells the linker which functions a request walks through, so that they lie side by side (see `order.ld`).

use std::env;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=order.ld");
    println!("cargo::rerun-if-env-changed=CAIRN_LINK_MAP");
    let is = |name: &str, value: &str| env::var(name).as_deref() == Ok(value);
    if !(is("CARGO_CFG_TARGET_OS", "linux") && is("CARGO_CFG_TARGET_ARCH", "x86_64")) {
        return;
    }
    let order = Path::new(env!("CARGO_MANIFEST_DIR")).join("order.ld");
    println!("cargo::rustc-link-arg-bins=-T");
    println!("cargo::rustc-link-arg-bins={}", order.display());
    // Where each function came from: for tests/order, which writes order.ld.
    if let Some(map) = env::var_os("CAIRN_LINK_MAP") {
        println!("cargo::rustc-link-arg-bins=-Wl,-Map,{}", Path::new(&map).display());
    }
}
