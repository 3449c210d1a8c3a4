import { createHash } from 'node:crypto'
import { readdirSync, readFileSync, writeFileSync } from 'node:fs'
import { join, relative } from 'node:path'
import { defineConfig } from 'vite'

const root = import.meta.dirname
const out = join(root, '../internal/server/web/dist')

/** Lists the files below a folder, with slashes, in the order of their bytes. */
function files(dir) {
  return readdirSync(dir, { withFileTypes: true, recursive: true })
    .filter((e) => e.isFile())
    .map((e) => relative(root, join(e.parentPath, e.name)).replaceAll('\\', '/'))
    .sort((a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)))
}

/**
 * Writes a hash over all sources beside what they were built into. A Go test
 * makes the same hash and fails when it differs (internal/server/web).
 */
const stamp = {
  name: 'stamp',
  closeBundle() {
    const hash = createHash('sha256')
    const sources = ['index.html', 'package-lock.json', 'package.json', ...files(join(root, 'public')), ...files(join(root, 'src')), 'tsconfig.json', 'vite.config.js']
    for (const name of sources) {
      const body = readFileSync(join(root, name))
      hash.update(`${name}\n${body.length}\n`)
      hash.update(body)
    }
    writeFileSync(join(out, 'sources.sha256'), hash.digest('hex') + '\n')
  },
}

export default defineConfig({
  root,
  base: '/',
  plugins: [stamp],
  esbuild: { jsx: 'automatic', jsxImportSource: 'preact' },
  build: { outDir: out, emptyOutDir: true, target: 'es2022', assetsInlineLimit: 0, modulePreload: { polyfill: false }, reportCompressedSize: true },
  server: { proxy: { '/api': 'http://127.0.0.1:7070', '/admin': 'http://127.0.0.1:7070', '/openapi.json': 'http://127.0.0.1:7070' } },
})
