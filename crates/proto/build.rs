//! Generates the gRPC code from `proto/` without a system protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = "../../proto";
    println!("cargo:rerun-if-changed={root}");
    let files = protox::compile(["cairn/v1/cairn.proto"], [root])?;
    tonic_prost_build::configure().bytes(".").compile_fds(files)?;
    Ok(())
}
