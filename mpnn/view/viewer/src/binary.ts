// Arrays that Python wrote as base64.

export function bytesOf(text: string): Uint8Array<ArrayBuffer> {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let k = 0; k < bytes.length; k++) bytes[k] = characters.charCodeAt(k);
  return bytes;
}

/** Little-endian integers of 2 or 4 bytes. All machines that run browsers are little-endian. */
export function integersOf(text: string, size: 2 | 4): Uint16Array | Uint32Array {
  const { buffer } = bytesOf(text);
  return size === 2 ? new Uint16Array(buffer) : new Uint32Array(buffer);
}
